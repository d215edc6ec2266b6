"""The seven zero-shot tasks of the paper, their items here, and tables of accuracies.

Without torch, and without the harness, which is slow to import.

`task_items` makes the frames of items. Two metrics can be read from them:

* acc: the right choice is the likeliest. The paper's main table has it for all seven.
* acc_norm: the likeliest by its mean per character. The paper has it for DeepSeekMoE in
  its comparison of global and layer-wise pruning.

WinoGrande has no acc_norm; its acc stands in for it.
"""

import math
import os
import tomllib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from heapr_lab.errors import SpecError, one_of
from heapr_lab.text.calibration_spec import DEFAULT_CORPUS
from heapr_lab.workbench.settings import CONTINUATION

PAPER_TASKS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("paper_tasks.toml").read_text("utf-8")
)
"""What is known of each task of the paper, in the order of its main table: `split`,
`n_items`, `choices` and `definition`."""
_CHOICES = {name: task["choices"] for name, task in PAPER_TASKS.items()}
CHOICES = _CHOICES | {"continuation": 4}
"""How many answers an item has, but for a few of ARC that have three or five."""
GUESSING = sum(1 / CHOICES[task] for task in PAPER_TASKS) / len(PAPER_TASKS)
"""The mean accuracy of guessing on the seven."""
METRICS = ("acc", "acc_norm")
MEAN = "mean"
"""The row of the mean over tasks."""
_ITEM = ["task", "item"]


def available_tasks() -> list[str]:
    """The ones of the seven tasks whose items are in `$HEAPR_TASKS_DIR`."""
    return [name for name in PAPER_TASKS if local_items(name)]


def local_items(name: str) -> Path | None:
    """The parquet file of a task: the whole split if available, else a part of it."""
    folder = os.environ.get("HEAPR_TASKS_DIR")
    if not folder or name not in PAPER_TASKS:
        return None
    split = PAPER_TASKS[name]["split"]
    whole = Path(folder) / name / f"{split}.parquet"
    if whole.is_file():
        return whole
    # A numbered part, as validation_1000; other variants differ from the official set.
    parts = sorted(whole.parent.glob(f"{split}_[0-9]*.parquet"))
    return parts[0].resolve() if parts else None


def continued(tasks: Iterable[str]) -> tuple[list[str], list[str]]:
    """The corpora whose text is continued in tasks, and the tasks of the harness.

    Example:
        >>> continued(["piqa", "continuation", "continuation:ptb"])
        (['pydocs', 'ptb'], ['piqa'])
    """
    pairs = [(task, continued_corpus(task)) for task in tasks]
    corpora = [corpus for _, corpus in pairs if corpus is not None]
    return corpora, [task for task, corpus in pairs if corpus is None]


def continued_corpus(task: str) -> str | None:
    """The corpus whose text a task continues; None for a task of the harness."""
    name, _, corpus = task.partition(":")
    return (corpus or DEFAULT_CORPUS) if name == CONTINUATION else None


def check_defined(names: Iterable[str]) -> None:
    """Check that the text of the harness's definitions has these names.

    That takes half a second; importing the harness and reading the definitions, which
    `tasks.harness.load_tasks` does for certainty, takes several.

    Raises:
        SpecError: it does not have one, so that there is no such task.
    """
    others = [name for name in names if name not in PAPER_TASKS]
    if others:
        text = _definitions()
        refuse_unknown([name for name in others if name.encode() not in text])


def _definitions() -> bytes:
    """The text of all definitions; those that others include have no suffix."""
    package = find_spec("lm_eval")
    assert package is not None
    assert package.origin is not None
    files = (
        Path(folder, name)
        for folder, _, names in os.walk(Path(package.origin).parent / "tasks")
        for name in names
        if name.endswith(".yaml") or "." not in name
    )
    return b"\n".join(path.read_bytes() for path in files)


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse tasks that the harness does not know.

    Raises:
        SpecError: there are any.
    """
    unknown = ", ".join(sorted(set(names)))
    if unknown:
        raise SpecError(
            f"the harness knows no task {unknown}; the paper's are "
            f"{', '.join(PAPER_TASKS)}, `lm_eval --tasks list` lists all"
        )


# --- accuracies ---------------------------------------------------------------------


def task_summary(items: pd.DataFrame, *, metric: str = "acc") -> pd.DataFrame:
    """The mean of a metric for each task, and in a last row the mean over tasks.

    Columns: task, metric, value, stderr, n (items). The standard errors are those over
    items, as the harness has them; that of the last row is of independent tasks.

    Args:
        items: a frame of `task_items`.
        metric: one of `METRICS`.

    Raises:
        SpecError: there is no such metric.
    """
    return _summary(_values(items, metric))


def task_difference(items: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """How much larger the accuracy is in one state than in another, item by item.

    Columns as of `task_summary`; the standard errors are those of the differences.

    Args:
        items: a frame of `task_items`.
        others: that of the other state, on the same items.

    Raises:
        SpecError: the items are not the same.
    """
    mine, theirs = (_values(frame, "acc").set_index(_ITEM) for frame in (items, others))
    if len(mine) != len(theirs) or not mine.index.sort_values().equals(
        theirs.index.sort_values()
    ):
        raise SpecError(
            f"{len(mine)} and {len(theirs)} items cannot be paired: they are not the "
            "same; ask both states with the same tasks, n_items and seed"
        )
    apart = mine["value"] - theirs["value"]
    return _summary(mine.assign(value=apart).reset_index())


def _values(items: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Columns task, item, metric (that is used) and value.

    Raises:
        SpecError: there is no such metric.
    """
    one_of(metric, METRICS, name="metric")
    missing = items[metric].isna()
    return items[_ITEM].assign(
        metric=missing.map({True: "acc", False: metric}),
        value=items[metric].where(~missing, items["acc"]),
    )


def _summary(values: pd.DataFrame) -> pd.DataFrame:
    groups = values.groupby("task", sort=False)
    rows = groups.agg(
        metric=("metric", "first"), value=("value", "mean"), n=("value", "size")
    )
    rows["stderr"] = groups["value"].std() / rows["n"] ** 0.5
    mean = {
        "metric": "/".join(rows["metric"].unique()),
        "value": rows["value"].mean(),
        "n": rows["n"].sum(),
        "stderr": math.sqrt((rows["stderr"] ** 2).sum(skipna=False)) / len(rows),
    }
    rows.loc[MEAN] = mean
    return rows.reset_index()[["task", "metric", "value", "stderr", "n"]]
