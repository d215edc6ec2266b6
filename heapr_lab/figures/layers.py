"""Figure 1: removed share per layer."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from heapr_lab.figures.style import (
    COLORS,
    LABELS,
    add_legend,
    figure_by,
    own_axes,
    show_percent,
    styled,
)
from heapr_lab.pruning.masks import KeepMask


def layer_ratios_data(masks: Mapping[float, KeepMask]) -> pd.DataFrame:
    """Share of the atomic experts removed in each layer, for each global ratio.

    Args:
        masks: the keep mask selected at each ratio.

    Returns:
        Columns ratio (requested), achieved_ratio, layer, layer_ratio.
    """
    frames = [
        pd.DataFrame(
            {
                "ratio": ratio,
                "achieved_ratio": keep.achieved_ratio,
                "layer": keep.layer_ratios().index,
                "layer_ratio": keep.layer_ratios().to_numpy(),
            }
        )
        for ratio, keep in masks.items()
    ]
    return pd.concat(frames, ignore_index=True)


@styled
def plot_layer_ratios(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Bars of the removed share per layer, with a dashed line at the global ratio.

    Args:
        data: from `layer_ratios_data`, of one ratio.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    ax.bar(data["layer"], data["layer_ratio"], width=0.8, color=COLORS[0])
    ax.axhline(
        data["achieved_ratio"].iloc[0],
        color="#222222",
        linestyle="--",
        linewidth=1.2,
        label="share removed from all layers together",
    )
    ax.set_xlabel("MoE layer [index]")
    ax.set_ylabel(LABELS["layer_ratio"])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False, axis="x")
    show_percent(ax.yaxis)
    add_legend(ax)
    return ax


@styled
def figure_layer_ratios(data: pd.DataFrame) -> Figure:
    """One panel of bars per global ratio, all on the same scale."""
    top = min(1.0, data["layer_ratio"].max() * 1.2)

    def plot(rows: pd.DataFrame, *, ax: Axes) -> Axes:
        plot_layer_ratios(rows, ax=ax).set_ylim(0, top)
        return ax

    return figure_by(
        data, "ratio", plot, title=lambda ratio: f"{100 * ratio:g} % removed globally"
    )
