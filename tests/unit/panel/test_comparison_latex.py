"""The LaTeX of the Compare tab: columns that tell rows apart, the rest said once."""

import pandas as pd
from random_tables import random_table

from heapr_lab.panel.compare_tab import CompareTab
from heapr_lab.panel.comparison_latex import comparison_latex
from heapr_lab.panel.session import Pin, PruningSession
from heapr_lab.pruning.options import Selection


def rows_of(latex: str) -> list[list[str]]:
    """The cells of the table, its header first."""
    lines = [line for line in latex.splitlines() if line.endswith(r"\\")]
    return [line.removesuffix(r" \\").split(" & ") for line in lines]


def pins(*selections: Selection) -> pd.DataFrame:
    """The rows of pinned selections."""
    tab = CompareTab(PruningSession(random_table(2, 4, 16)))
    tab.show_pins([Pin(f"p_{i}", chosen) for i, chosen in enumerate(selections)])
    return tab.frame()


def test_columns_tell_rows_apart() -> None:
    """One setting differs and is a column; what is the same is in the caption."""
    frame = pins(Selection(0.25, "shrunk"), Selection(0.5, "shrunk", "layer"))
    frame["Δloss a_b"] = [0.123456, 0.7]
    frame["accuracy t"] = [0.5, float("nan")]
    latex = comparison_latex(frame)
    header, first, second = rows_of(latex)
    assert header[:3] == ["label", "scope", r"removed [\%] $\uparrow$"]
    assert [row[:2] for row in (first, second)] == [
        [r"p\_0", "global"], [r"p\_1", "layer"]
    ]  # fmt: skip
    assert float(first[2]) == 25
    assert float(second[2]) == 50
    assert r"a\_b [nats per token] $\downarrow$" in header[-2]
    assert [row[-2] for row in (first, second)] == ["0.1235", "0.7000"]
    assert [row[-1] for row in (first, second)] == ["50", "---"]
    (caption,) = [line for line in latex.splitlines() if "caption" in line]
    assert "estimator shrunk, granularity atom, structure ragged, of atoms" in caption
    assert "FLOPs at 2,048 tokens of context" in caption
    assert "multiple" not in latex
    assert latex.index(r"\toprule") < latex.index(r"\bottomrule")


def test_a_setting_that_differs_is_never_in_the_caption() -> None:
    """Not even where one row has none, as those of methods."""
    frame = pins(Selection(0.25), Selection(0.25, structure="aligned", multiple=4))
    method = {"label": "reap 25%", "method": "reap", "achieved_ratio": 0.25}
    together = pd.DataFrame([*frame.to_dict("records"), method])
    latex = comparison_latex(together)
    header, *rows = rows_of(latex)
    assert {"estimator", "structure", "multiple"} <= set(header)
    assert rows[-1][:2] == [r"reap 25\%", "---"]
    caption = latex.partition(r"\caption{")[2].partition("}\n")[0]
    assert "heapr" not in caption
    assert "aligned" not in caption
