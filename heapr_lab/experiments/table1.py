"""Table 1 of the paper on any model: its methods, ratios and text, and its rows.

The rows of rivals in the paper are quoted from other papers, which calibrated them on
text of their own; here all of them are fitted to the same windows.
"""

from typing import Any

import pandas as pd

from heapr_lab import methods
from heapr_lab.figures.paper import paper_table, plain_name
from heapr_lab.models.named import PAPER_MODELS
from heapr_lab.tasks.paper_tasks import PAPER_TASKS

CALIBRATED_ON = "wikitext2"
CORPORA = ("wikitext2", "ptb")
RATIOS = (0.2, 0.25, 0.4, 0.5)
"""The ratios for models that are not in the paper: all that the paper has."""
NOT_COMPARABLE = (
    "not comparable with the above: model, windows, items and calibration may "
    "differ, and the rows of rivals are quoted from their papers"
)
"""What is said of the rows of the paper."""
_ORIGINAL = "Original"
"""The paper's name of the dense model."""


def methods_of_table1() -> dict[str, str | None]:
    """The names of the methods here by their names in the paper, None if missing.

    One that is called "-like" follows the paper's text, because there is no code of its
    authors to check it against.
    """
    here = {plain_name(name): name for name in methods.names()}
    named = paper_table("main_results")["method"].drop_duplicates()
    return {name: here.get(plain_name(name)) for name in named if name != _ORIGINAL}


def ratios_of_table1(model: str) -> tuple[float, ...]:
    """The ratios that the paper has for the model of that hub id, or `RATIOS`."""
    rows = paper_table("main_results")
    pruned = rows[rows["model"].map(PAPER_MODELS).eq(model) & rows["ratio"].gt(0)]
    return tuple(pruned["ratio"].drop_duplicates().astype(float)) or RATIOS


def published_rows(model: str) -> pd.DataFrame:
    """The rows of the paper for the model of that hub id, or for all that it has.

    Returns:
        The columns of `main_results.csv`, and `published` (true).
    """
    rows = paper_table("main_results")
    matches = rows[rows["model"].map(PAPER_MODELS).eq(model)]
    shown = rows if matches.empty else matches
    return shown.reset_index(drop=True).assign(published=True)


def as_table1(results: pd.DataFrame) -> pd.DataFrame:
    """Results of `compare_methods` in the columns of the paper's table.

    Returns:
        A row for each method and ratio, the dense model first: `method`, `ratio`,
        `achieved_ratio`, the perplexity of each corpus, as `wikitext2_ppl`, the
        accuracy (`acc`) of each task, `average` where all seven of the paper are
        measured, and `parameters`.
    """
    lines: dict[tuple[str, float], dict[str, Any]] = {}
    for row in results.to_dict("records"):
        labels = {name: row[name] for name in ("method", "ratio", "achieved_ratio")}
        line = lines.setdefault((row["method"], row["ratio"]), labels)
        if pd.notna(row.get("perplexity")):
            line[f"{row['dataset']}_ppl"] = row["perplexity"]
        else:
            line[row["dataset"]] = row.get("acc")
    frame = pd.DataFrame(lines.values())
    if {*PAPER_TASKS} <= {*frame.columns}:
        frame["average"] = frame[[*PAPER_TASKS]].mean(axis=1, skipna=False)
    sizes = results.drop_duplicates(["method", "ratio"])["parameters"]
    return frame.assign(parameters=sizes.to_numpy())
