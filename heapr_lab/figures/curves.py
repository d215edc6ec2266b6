"""Evaluation rows as tidy curves over the pruning ratio, and how they are drawn.

Every curve frame has the columns `source` ("ours" or "paper"), `name` (which curve:
an estimator, a scope or a granularity), `model` (of the paper's rows), `ratio`
(achieved share of the routed atomic experts), `metric`, `dataset`, `value`, `stderr`,
and the same two divided by the dense model's value, `relative`, `relative_stderr`.
The paper's are from its tables, as published.
"""

import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from heapr_lab.errors import SpecError
from heapr_lab.figures.style import (
    LABELS,
    PAPER_GREY,
    REFERENCE_GREY,
    REFERENCE_LINE,
    look,
    name_points,
    place,
    show_percent,
)
from heapr_lab.pruning.savings import at_context
from heapr_lab.tasks.paper_tasks import CHOICES, PAPER_TASKS

METRICS = ("perplexity", "accuracy")

OF_ATOMS = {"granularity": "atom", "structure": "ragged"}
AS_THE_PAPER = OF_ATOMS | {"estimator": "heapr", "scope": "global"}
"""The settings of the paper's method."""

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (
    _PACKAGE.parent / "data" / "paper",
    # where a wheel installs them (pyproject.toml, tool.setuptools.data-files)
    Path(sysconfig.get_path("data")) / "share" / "heapr_lab" / "paper",
)

CURVE_COLUMNS = [
    "source",
    "name",
    "model",
    "ratio",
    "metric",
    "dataset",
    "value",
    "stderr",
    "relative",
    "relative_stderr",
]


def matching(frame: pd.DataFrame, settings: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of `frame` in which every column of `settings` has its value.

    Raises:
        SpecError: there is no such row.
    """
    rows = np.ones(len(frame), dtype=bool)
    for column, value in settings.items():
        rows &= frame[column].eq(value).to_numpy()
    if not rows.any():
        held = {column: sorted(set(frame[column].dropna())) for column in settings}
        raise SpecError(
            f"no rows with {dict(settings)}: the frame contains {held}. Evaluate that "
            "setting first, or use one that was evaluated."
        )
    return frame[rows]


def require_one_row(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """`frame` without repeated rows, with one row for each combination of `keys`.

    Raises:
        SpecError: two different rows have the same keys.
    """
    unique = frame.drop_duplicates()
    twice = unique[unique.duplicated(list(keys), keep=False)]
    if twice.empty:
        return unique
    first = twice[twice[list(keys)].eq(twice[list(keys)].iloc[0]).all(axis=1)]
    differ = [column for column in first if first[column].nunique(dropna=False) > 1]
    raise SpecError(
        f"{len(first)} rows for {first[list(keys)].iloc[0].to_dict()}, expected one; "
        f"they differ in {differ}. Keep the rows of one setting before plotting, as in "
        'results[results["seed"] == 0].'
    )


def relative_to_dense(results: pd.DataFrame) -> pd.DataFrame:
    """Perplexities and accuracies of `results`, also relative to the dense model.

    Adds `relative` and `relative_stderr` (the dense value is taken as exact), and sets
    `ratio` to the achieved ratio.

    Args:
        results: evaluation rows, including those of the dense model (estimator
            "dense").

    Raises:
        SpecError: the dense model has no row for a metric and data set.
    """
    rows = results[results["metric"].isin(METRICS)].copy()
    dense = rows[rows["estimator"].eq("dense")]
    base = dense.groupby(["dataset", "metric"])["value"].first()
    keys = pd.MultiIndex.from_frame(rows[["dataset", "metric"]])
    missing = sorted(set(keys) - set(base.index))
    if missing:
        raise SpecError(
            f"no row with estimator 'dense' for {missing}, but values are relative to "
            "the dense model. Evaluate the dense model on them too."
        )
    divisor = base.reindex(keys).to_numpy()
    rows["relative"] = rows["value"].to_numpy() / divisor
    rows["relative_stderr"] = rows["stderr"].to_numpy() / divisor
    rows["relative_stderr"] = rows["relative_stderr"].mask(
        rows["estimator"].eq("dense"), 0.0
    )
    rows["ratio"] = rows["achieved_ratio"]
    return rows


def curves_data(
    results: pd.DataFrame, *, vary: str, settings: Mapping[str, Any]
) -> pd.DataFrame:
    """One curve per value of column `vary`, each starting at the dense model.

    Args:
        results: evaluation rows.
        vary: the column that names the curves.
        settings: column values held fixed.

    Returns:
        A curve frame (columns of this module's docstring) sorted by name, metric,
        data set and ratio.
    """
    rows = relative_to_dense(results)
    pruned = matching(rows[~rows["estimator"].eq("dense")], settings)
    pruned = pruned.assign(name=pruned[vary])
    pruned = require_one_row(pruned, ["name", "ratio", "dataset", "metric"])
    dense = rows[rows["estimator"].eq("dense")].drop_duplicates(["dataset", "metric"])
    starts = [dense.assign(name=name) for name in sorted(set(pruned["name"]))]
    curves = pd.concat([*starts, pruned]).assign(source="ours", model="")
    # a curve has a start only for data sets on which it has other points
    alive = pruned[["name", "metric", "dataset"]].drop_duplicates()
    curves = curves.merge(alive, on=["name", "metric", "dataset"])
    return sort_curves(curves)


def savings_curves(
    savings: pd.DataFrame, *, vary: str, settings: Mapping[str, Any]
) -> pd.DataFrame:
    """Curves of the FLOPs saved (metric "flops_reduction"), from 0 at ratio 0.

    Their `dataset` names the context length for which operations were counted.
    """
    rows = matching(savings, settings)
    rows = rows.assign(name=rows[vary], ratio=rows["achieved_ratio"])
    rows = require_one_row(rows, ["name", "ratio"])
    starts = rows.drop_duplicates("name").assign(ratio=0.0, flops_reduction=0.0)
    rows = pd.concat([starts, rows]).drop_duplicates(["name", "ratio"])
    rows = rows.rename(columns={"flops_reduction": "value"}).assign(
        source="ours",
        model="",
        metric="flops_reduction",
        dataset=rows["seq_len"].map(at_context),
    )
    return sort_curves(rows)


def sort_curves(curves: pd.DataFrame) -> pd.DataFrame:
    """`curves` with exactly the curve columns, sorted, with a new index."""
    order = ["source", "metric", "dataset", "name", "model", "ratio"]
    full = curves.reindex(columns=CURVE_COLUMNS)
    return full.sort_values(
        order,
        key=lambda column: column.map(place) if column.name == "name" else column,
        kind="stable",
        ignore_index=True,
    )


def panels_of(data: pd.DataFrame) -> list[tuple[str, str]]:
    """The (metric, data set) pairs of rows: perplexities, accuracies, then FLOPs."""
    pairs = set(zip(data["metric"], data["dataset"], strict=True))
    order = [*METRICS, "flops_reduction"]
    return sorted(pairs, key=lambda pair: (order.index(pair[0]), pair[1]))


def panel(data: pd.DataFrame, metric: str, dataset: str) -> pd.DataFrame:
    """Our rows of one panel with the paper's rows of its metric.

    The paper's rows have the data set "" if they are drawn on every data set.

    Raises:
        SpecError: we have no such rows.
    """
    ours = matching(data, {"source": "ours", "metric": metric, "dataset": dataset})
    paper = data["source"].eq("paper") & data["metric"].eq(metric)
    return pd.concat([ours, data[paper & data["dataset"].isin(["", dataset])]])


def draw_curve(ax: Axes, curve: pd.DataFrame, *, column: str, **line: Any) -> None:
    """One curve over the ratio, with error bars where there are standard errors.

    Args:
        ax: where to draw.
        curve: rows of a curve frame, sorted by ratio.
        column: "value" or "relative".
        **line: keywords of matplotlib's `errorbar`.
    """
    errors = curve["relative_stderr" if column == "relative" else "stderr"]
    bars = None if errors.isna().all() else errors.fillna(0)
    ax.errorbar(curve["ratio"], curve[column], yerr=bars, **line)


def draw_curves(ax: Axes, rows: pd.DataFrame, *, column: str) -> None:
    """Our curves with error bars, and the paper's points as hollow grey markers."""
    ours = rows[rows["source"].eq("ours")]
    for name in ours["name"].drop_duplicates():
        curve = ours[ours["name"].eq(name)].sort_values("ratio")
        depth = 3 - 0.01 * place(name)  # the first in the legend lies on top
        draw_curve(ax, curve, column=column, zorder=depth, **look(name).keywords())
    draw_paper_points(ax, rows, column=column)


def draw_paper_points(ax: Axes, rows: pd.DataFrame, *, column: str) -> None:
    """The paper's points among rows of a curve frame as hollow grey markers."""
    paper = rows[rows["source"].eq("paper")]
    for (name, model), points in paper.groupby(["name", "model"], sort=False):
        ax.plot(
            points["ratio"],
            points[column],
            linestyle="none",
            marker=look(name).marker,
            markersize=6.5,
            markerfacecolor="none",
            markeredgecolor=PAPER_GREY,
            markeredgewidth=1.2,
            zorder=4,
            label=paper_label(model, look(name).label),
        )


def finish_panel(ax: Axes, rows: pd.DataFrame, metric: str, *, relative: bool) -> None:
    """Axis labels, scales, and lines of the dense model and of guessing."""
    key = f"relative {metric}" if relative else metric
    ax.set_xlabel(LABELS["ratio"])
    ax.set_ylabel(LABELS[key])
    show_percent(ax.xaxis)
    if metric != "perplexity":
        show_percent(ax.yaxis)
    if relative:
        ax.axhline(1, zorder=1, **REFERENCE_LINE)
    if metric == "perplexity":
        _use_log(ax)
    if metric == "accuracy":
        _draw_chance(ax, rows)


def name_models(ax: Axes, points: pd.DataFrame, *, column: str) -> None:
    """Write beside points of the paper of which model they are, not ours.

    Args:
        ax: where everything else is drawn already.
        points: rows of a curve frame.
        column: "value" or "relative".
    """
    for row in points.to_dict("records"):
        tasks = f", {len(PAPER_TASKS)} tasks" if row["metric"] == "accuracy" else ""
        name = f"{short_name(row['model'])}{tasks}"
        name_points(ax, {name: (row["ratio"], row[column])})


def _draw_chance(ax: Axes, rows: pd.DataFrame) -> None:
    """A dotted line at the accuracy of guessing."""
    first = rows[rows["source"].eq("ours")].iloc[0]
    dense = first["value"] / first["relative"]
    ax.axhline(
        1 / CHOICES["continuation"] / dense,
        color=REFERENCE_GREY,
        linestyle=":",
        linewidth=1.2,
        label="guessing",
    )


def _use_log(ax: Axes) -> None:
    """A logarithmic y axis with tick labels in decimal notation."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    narrow = high / low < 4  # too few ticks at 1, 2, 5, 10 to read values from
    ax.yaxis.set_major_locator(
        MaxNLocator(5, steps=[1, 2, 5, 10]) if narrow else LogLocator(subs=(1, 2, 5))
    )
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")


# --- the paper ----------------------------------------------------------------------


def paper_table(name: str) -> pd.DataFrame:
    """One of the tables of the paper, as published.

    Args:
        name: `main_results`, `global_vs_layer`, `granularity`, `cost`,
            `calibration_sizes` or `boundary`.

    Returns:
        The CSV file as a frame; a dash in the paper is NaN.

    Raises:
        SpecError: there is no such table.
    """
    for folder in _FOLDERS:
        path = folder / f"{name}.csv"
        if path.is_file():
            return pd.read_csv(path)
    names = sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.csv")})
    raise SpecError(
        f"no table {name!r} in {[str(folder) for folder in _FOLDERS]}: found "
        f"{names or 'no CSV file'}. Use the name of one of those."
    )


def paper_label(model: str, name: str) -> str:
    """Legend label of the paper's points of the curve `name`, for `model`."""
    short = model.removesuffix("-Base").removesuffix("-Chat")
    return f"paper: {name}, {short} (not comparable: other model and data)"


def short_name(model: str) -> str:
    """The family of one of the paper's models, as it stands beside its points."""
    return model.partition("MoE")[0].removesuffix("-")


def plain_name(method: str) -> str:
    """The name of a method without what differs between the paper's and ours.

    Example:
        >>> plain_name("D^2-MoE"), plain_name("moe-i2-like")
        ('d2moe', 'moei2')
    """
    letters = "".join(letter for letter in method.lower() if letter.isalnum())
    return letters.removesuffix("like")


def paper_dense(model: str) -> pd.Series:
    """The unpruned model's published WikiText-2 perplexity and mean task accuracy.

    Returns:
        Series with `perplexity` and `accuracy` (a fraction; the mean of the seven
        tasks, as the paper prints them to two digits).
    """
    table = paper_table("main_results")
    row = table[table["model"].eq(model) & table["method"].eq("Original")].iloc[0]
    return pd.Series(
        {
            "perplexity": float(row["wikitext2_ppl"]),
            "accuracy": float(np.mean([row[task] for task in PAPER_TASKS])),
        }
    )
