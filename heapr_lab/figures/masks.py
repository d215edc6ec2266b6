"""What masks remove: figure 1, the share of each layer; and two masks compared.

The comparison is the overlap by layer beside chance.
"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from heapr_lab.figures.style import (
    COLORS,
    LABELS,
    figure_of,
    own_axes,
    show_percent,
    styled,
)
from heapr_lab.inspection.mask_diff import ScoredMask, check_scored, overlap
from heapr_lab.pruning.masks import KeepMask

_COLORS = {"both": "#444444", "a": "#0072B2", "b": "#D55E00"}
_N_SD = 2


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
    ax.grid(visible=False, axis="x")
    _label_shares(ax)
    return ax


def _label_shares(ax: Axes) -> None:
    """Shares of the layers over their numbers."""
    ax.set(xlabel="MoE layer [index]", ylabel=LABELS["layer_ratio"])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    show_percent(ax.yaxis)


@styled
def figure_layer_ratios(data: pd.DataFrame) -> Figure:
    """One panel of bars per global ratio, all on the same scale."""
    top = min(1.0, data["layer_ratio"].max() * 1.2)

    def draw(ratio: float, ax: Axes) -> None:
        plot_layer_ratios(data[data["ratio"].eq(ratio)], ax=ax)
        ax.set(ylim=(0, top), title=f"{100 * ratio:g} % removed globally")

    return figure_of(data["ratio"].drop_duplicates(), draw)


def mask_diff_data(a: ScoredMask, b: ScoredMask) -> pd.DataFrame:
    """The overlap of two masks by layer.

    Args:
        a: a mask with its scores.
        b: another of the same model.

    Returns:
        One row for each layer: layer, and as shares of its atoms both, a, b (removed by
        one alone), expected and sd (of both, by chance). `attrs` has `labels` of A and
        B.

    Raises:
        SpecError: the masks are of different models, or there is not one score for each
            atom.
    """
    check_scored(a, b)
    counts = overlap(a.keep, b.keep)
    shares = {
        "both": counts["both"],
        "a": counts["removed_a"] - counts["both"],
        "b": counts["removed_b"] - counts["both"],
        "expected": counts["expected"],
        "sd": counts["sd"],
    }
    layers = pd.DataFrame({k: n / counts["n_atoms"] for k, n in shares.items()})
    layers.insert(0, "layer", counts["layer"])
    layers.attrs["labels"] = (a.label, b.label)
    return layers


@styled
def plot_mask_diff(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Bars of what both masks remove, A alone and B alone, in each layer.

    Across them what both would remove by chance, with two standard deviations.

    Args:
        data: from `mask_diff_data`.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    a, b = data.attrs["labels"]
    names = {"both": "removed by both", "a": f"only by {a}", "b": f"only by {b}"}
    bottom = 0.0 * data["both"]
    for fate, label in names.items():
        ax.bar(
            data["layer"], data[fate], bottom=bottom, width=0.8, color=_COLORS[fate],
            label=label,
        )  # fmt: skip
        bottom = bottom + data[fate]
    _draw_chance(ax, data)
    ax.set_ylim(0, 1.05 * max(bottom.max(), 1e-3))
    _label_shares(ax)
    return ax


def _draw_chance(ax: Axes, data: pd.DataFrame) -> None:
    """What both would remove by chance, in black with a white border."""
    chance = {"color": "black", "label": f"both, by chance ± {_N_SD} sd"}
    white = {"color": "white", "ecolor": "white", "elinewidth": 3.5}
    for size, width, line in ((9, 3.5, white), (8, 1.5, chance)):
        ax.errorbar(
            data["layer"], data["expected"], yerr=_N_SD * data["sd"], fmt="_",
            ms=size, mew=width, **line,
        )  # fmt: skip


@styled
def figure_mask_diff(data: pd.DataFrame) -> Figure:
    """Overlap by layer beside chance, with a legend."""

    def draw(title: str, ax: Axes) -> None:
        plot_mask_diff(data, ax=ax).set_title(title)

    return figure_of(["removed atomic experts"], draw)
