"""Accuracies of tasks, and differences between states of a model, without torch.

`task_items` makes the frames. Three metrics can be read from them:

* acc: the right choice is the likeliest. The paper's main table has it for all seven.
* acc_norm: the likeliest by its mean per character. The paper has it for DeepSeekMoE in
  its comparison of global and layer-wise pruning.
* p_right: likelihood of the right choice over that of all. No paper reports it.

WinoGrande has no acc_norm; its acc stands in for it.
"""

import math

import pandas as pd

from heapr_lab.errors import SpecError, one_of

METRICS = ("acc", "acc_norm", "p_right")
MEAN = "mean"
"""The row of the mean over tasks."""
_ITEM = ["task", "item"]


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
