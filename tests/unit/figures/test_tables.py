"""Tables are the results, with their units, the paper's rows marked."""

import pandas as pd
import pytest
from figure_rows import evaluation_rows, saving_rows

from heapr_lab import figures
from heapr_lab.errors import SpecError


def test_main_table_is_a_pivot_of_the_results():
    """Cells are the evaluation values; HEAPr is the global one, CAMERA layer-wise."""
    data = figures.main_data(evaluation_rows())
    table = figures.main_table(data)
    assert list(table["method"]) == [
        "dense model",
        *("HEAPr", "CAMERA-P (layer-wise)") * 2,
    ]
    assert list(table["removed [%]"]) == [0, 20, 20, 50, 50]
    # 20 · (1 + harm · ratio), harm 0.1 and 0.5
    assert list(table["wikitext2 perplexity ↓"]) == pytest.approx(
        [20, 20.4, 22, 21, 25]
    )
    assert table["continuation accuracy [%] ↑"][1] == pytest.approx(49)
    assert table["± continuation accuracy"][1] == pytest.approx(1)
    paper = data[data["source"].eq("paper")]
    assert list(paper["value"]) == [6.54, 6.80]


def test_paper_tables_are_found_or_named():
    """The published numbers load; an unknown table's error names those there are."""
    assert list(figures.paper_table("boundary")["accuracy_retained"]) == [0.93, 0.38]
    with pytest.raises(SpecError, match=r"no table 'speed'.*'boundary'"):
        figures.paper_table("speed")


def test_the_main_figure_has_few_estimators():
    """Controls, which set the scale, are in the table alone."""
    results = evaluation_rows()
    heapr = results[results["estimator"].eq("heapr")]
    more = [heapr.assign(estimator=name) for name in ("fisher", "magnitude", "random")]
    data = figures.main_data(pd.concat([results, *more]))
    assert {"fisher", "magnitude", "random"} <= set(data["name"])
    (legend,) = figures.figure_main(data).legends
    shown = {text.get_text() for text in legend.get_texts()}
    assert "Fisher" in shown
    assert not {"magnitude", "random"} & shown


def test_the_summary_has_a_row_per_ratio():
    """Dense, 20 and 50 %, with what is saved; nothing is saved of the dense model."""
    table = figures.summary_table(evaluation_rows(), saving_rows())
    assert table["ratio"].tolist() == [0.0, 0.2, 0.5]
    assert table["perplexity wikitext2"].tolist() == pytest.approx([20, 20.4, 21])
    saved = table["FLOPs saved at 256 tokens of context"].tolist()
    assert saved == pytest.approx([0, 0.08, 0.2])
