"""Figure 1: removed share per layer; and a heat map of the widths of the experts."""

from collections.abc import Mapping

import numpy as np
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


@styled
def plot_widths(
    widths: pd.DataFrame, tokens: pd.DataFrame, *, ax: Axes | None = None
) -> Axes:
    """Heat map of the atomic experts kept in each expert.

    Args:
        widths: kept atoms, layer × expert, as `KeepMask.widths()` gives them.
        tokens: routed tokens, layer × expert. The area of a dot is the expert's share
            of the tokens of its layer; × marks an expert without tokens.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax, size=(7, 0.9 + 0.26 * min(len(widths), 24)))
    values = np.ma.masked_invalid(widths.to_numpy(dtype=float))
    rows = np.arange(len(widths))
    image = ax.pcolormesh(
        np.arange(widths.shape[1] + 1) - 0.5,
        np.arange(len(widths) + 1) - 0.5,
        values,
        vmin=0,
        vmax=values.max(),
        edgecolor="white",
        linewidth=0.4,
    )
    _draw_load(ax, tokens.reindex_like(widths))
    step = max(1, -(-len(rows) // 24))
    ax.set_yticks(rows[::step], [str(layer) for layer in widths.index[::step]])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.invert_yaxis()
    ax.grid(visible=False)
    key = "dot area: share of the layer's tokens, ×: no token routed"
    ax.set_xlabel(f"expert [index]\n{key}")
    ax.set_ylabel("MoE layer [index]")
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label("atomic experts kept [count]")
    bar.outline.set_visible(False)
    return ax


def _draw_load(ax: Axes, tokens: pd.DataFrame) -> None:
    counts = tokens.to_numpy(dtype=float)
    totals = np.nansum(counts, axis=1, keepdims=True)
    share = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    used = np.argwhere(share > 0)
    # the largest dot fills a cell of about 0.2 inches on a figure 7 inches wide
    largest = 72 * min(0.16, 4.5 / counts.shape[1])
    ax.scatter(
        used[:, 1],
        used[:, 0],
        s=largest**2 * share[share > 0] / share.max() if share.any() else [],
        color="white",
        edgecolor="#222222",
        linewidth=0.5,
    )
    idle = np.argwhere(counts == 0)
    if len(idle):
        ax.scatter(idle[:, 1], idle[:, 0], marker="x", color="white", s=25)
