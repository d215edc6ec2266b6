"""How time and memory of the scores grow with each size of a model."""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.figures.cost import LABELS
from benchmarks.figures.looks import look
from heapr_lab.figures.style import (
    REFERENCE_GREY,
    add_legend,
    own_axes,
    share_legend,
    styled,
)

_SIZES = ("tokens", "layers", "experts", "d_model")
_QUANTITIES = {
    # measured: predicted, unit, label, ticks
    "seconds": ("predicted_seconds", 1.0, LABELS["seconds"], (0.5, 1, 2, 5, 10, 20)),
    "peak_bytes": ("plan_bytes", 1e9, "peak memory [GB] ↓", (0.5, 1, 2, 4)),
}
_RATIOS = {
    "time ÷ FLOPs and bytes": "seconds_ratio",
    "time ÷ plan": "plan_seconds_ratio",
    "memory ÷ plan": "bytes_ratio",
}
_ALL = "any"


def growth_data(measured: pd.DataFrame) -> pd.DataFrame:
    """Measured and predicted cost by the size that is varied; the first shape in each.

    Args:
        measured: rows of `benchmarks/growth.py`; of repeats the median is taken.

    Returns:
        Columns varied, value, way (in memory, streamed), seconds, predicted_seconds,
        plan_seconds, peak_bytes, plan_bytes, and the three quotients of measured and
        predicted: seconds_ratio, plan_seconds_ratio, bytes_ratio.
    """
    keys = ["varied", "way", *_SIZES]
    costs = [
        *(name for name, (predicted, *_) in _QUANTITIES.items()),
        *(predicted for predicted, *_ in _QUANTITIES.values()),
        "plan_seconds",
        *_RATIOS.values(),
    ]
    rows = measured.groupby(keys, sort=False)[costs].median().reset_index()
    parts = []
    for size in _SIZES:
        own = rows[rows["varied"].isin([size, "none"])]
        part = own[["way", *costs]].assign(varied=size, value=own[size])
        parts.append(part.sort_values(["way", "value"]))
    return pd.concat(parts, ignore_index=True)[["varied", "value", "way", *costs]]


@styled
def plot_growth(
    data: pd.DataFrame, *, quantity: str = "seconds", ax: Axes | None = None
) -> Axes:
    """Points that were measured, over lines that were predicted.

    Args:
        data: from `growth_data`, of one size that is varied.
        quantity: "seconds" or "peak_bytes".
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    predicted, unit, label, ticks = _QUANTITIES[quantity]
    for way, rows in data.groupby("way"):
        style = look(str(way))
        ax.plot(rows["value"], rows[predicted] / unit, color=style.color, linewidth=1)
        points = style.keywords() | {"linestyle": "none"}
        ax.plot(rows["value"], rows[quantity] / unit, **points)
    ax.plot([], [], color=REFERENCE_GREY, linewidth=1, label="predicted")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    values = sorted(data["value"].unique())
    _show_ticks(ax.xaxis, values[:: 2 if len(values) > 4 else 1])
    _show_ticks(ax.yaxis, ticks)
    ax.set_xlabel(str(data["varied"].iloc[0]))
    ax.set_ylabel(label)
    add_legend(ax)
    return ax


def _show_ticks(axis: Axis, values: list[float] | tuple[float, ...]) -> None:
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
    axis.set_ticks(values)
    axis.set_ticks([], minor=True)


@styled
def figure_growth(data: pd.DataFrame) -> Figure:
    """A column for each size: time above, peak memory below."""
    sizes = list(data["varied"].drop_duplicates())
    figure, grid = plt.subplots(
        len(_QUANTITIES), len(sizes), figsize=(7, 4.4), sharex="col", sharey="row"
    )
    for quantity, axes in zip(_QUANTITIES, grid, strict=True):
        for size, ax in zip(sizes, axes, strict=True):
            plot_growth(data[data["varied"].eq(size)], quantity=quantity, ax=ax)
            ax.label_outer()
    share_legend(figure)
    return figure


def growth_table(data: pd.DataFrame) -> pd.DataFrame:
    """`growth_data` for readers: ranges of measured ÷ predicted for each size."""
    rows = []
    for (size, way), own in data.groupby(["varied", "way"], sort=False):
        values = f"{own['value'].min()} to {own['value'].max()}"
        rows.append({"varied": size, "values": values, "layers": way} | _ranges(own))
    for way, own in data.groupby("way"):
        rows.append({"varied": _ALL, "values": "", "layers": way} | _ranges(own))
    return pd.DataFrame(rows)


def _ranges(rows: pd.DataFrame) -> dict[str, str]:
    return {
        name: f"{rows[ratio].min():.2f} to {rows[ratio].max():.2f}"
        for name, ratio in _RATIOS.items()
    }
