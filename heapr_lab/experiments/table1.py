"""Table 1 of the paper on any model: its methods, ratios and text, and its rows.

The rows of rivals in the paper are quoted from other papers, which calibrated them on
text of their own; here all of them are fitted to the same windows.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

import pandas as pd

from heapr_lab import methods
from heapr_lab.figures.paper import paper_table, plain_name
from heapr_lab.methods.comparison import DENSE
from heapr_lab.models.named import PAPER_MODELS
from heapr_lab.tasks.paper_tasks import PAPER_TASKS
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.workbench.settings import PROFILES, Profile

CALIBRATED_ON = "wikitext2"
CORPORA = ("wikitext2", "ptb")
RATIOS = (0.2, 0.25, 0.4, 0.5)
"""The ratios for models that are not in the paper: all that the paper has."""
_ORIGINAL = "Original"
"""The paper's name of the dense model."""
_OURS = "HEAPr"
"""The paper's own method, the only one whose rows its authors measured."""


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


@dataclass(frozen=True)
class Measured:
    """What a comparison was made of, to tell where it differs from the paper."""

    model: str
    """Its hub id or folder."""
    profile: Profile
    calibration: CalibrationSet
    corpus: str
    """The corpus of the calibration."""
    n_items: Mapping[str, int]
    """The number of items that were evaluated, by task."""

    def differences(self, row: Mapping[str, Any]) -> list[str]:
        """Why a published row is not comparable with what was measured."""
        reasons = [] if PAPER_MODELS[row["model"]] == self.model else ["another model"]
        if row["method"] != _ORIGINAL:
            reasons += self._calibrated(row["method"])
        whole = PROFILES["paper"]
        if (self.profile.seq_len, self.profile.n_test) != (whole.seq_len, whole.n_test):
            reasons.append("perplexity of other windows")
        partly = [
            f"{task} {n:,} of {PAPER_TASKS[task][1]:,}"
            for task, n in self.n_items.items()
            if task in PAPER_TASKS and n != PAPER_TASKS[task][1]
        ]
        return reasons + ([f"other items: {', '.join(partly)}"] if partly else [])

    def _calibrated(self, method: str) -> list[str]:
        """Why the calibration of a published method is another one."""
        if method != _OURS:
            return ["quoted by the paper from another one, calibrated there"]
        whole, text = PROFILES["paper"], self.calibration
        same = (text.n_sequences, text.seq_len) == (whole.n_sequences, whole.seq_len)
        return [] if same and self.corpus == CALIBRATED_ON else ["other calibration"]


def published_rows(measured: Measured) -> pd.DataFrame:
    """The rows of the paper for the model, or for all of its models if it has another.

    Returns:
        The columns of `main_results.csv`, `published` (true), and `not_comparable`:
        the reasons, empty if there is none.
    """
    rows = paper_table("main_results")
    matches = rows[rows["model"].map(PAPER_MODELS).eq(measured.model)]
    shown = (rows if matches.empty else matches).reset_index(drop=True)
    reasons = [measured.differences(row) for row in shown.to_dict("records")]
    return shown.assign(published=True, not_comparable=["; ".join(r) for r in reasons])


def with_notes(published: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows of the paper for readers, and notes.

    In place of each reason in `not_comparable` there is a letter, which the note of the
    reason begins with.
    """
    reasons = [text.split("; ") if text else [] for text in published["not_comparable"]]
    letters = dict(
        zip(dict.fromkeys(itertools.chain(*reasons)), ascii_lowercase, strict=False)
    )
    marks = [", ".join(letters[reason] for reason in row) for row in reasons]
    shown = published.drop(columns=["published", "not_comparable"])
    notes = [f"{letter}: {reason}" for reason, letter in letters.items()]
    return shown.assign(**{"not comparable": marks}), notes


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


def n_items_of(results: pd.DataFrame) -> dict[str, int]:
    """The number of items of each task in results of `compare_methods`."""
    dense = results[results["method"].eq(DENSE)]
    if "n_items" not in dense:
        return {}
    of_tasks = dense.dropna(subset="n_items").set_index("dataset")["n_items"]
    return {str(task): int(n) for task, n in of_tasks.items()}
