"""What masks remove: figure 1, the share of each layer; and two masks compared.

The comparison is the overlap by layer beside chance, and the ranks of the atoms.
"""

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from heapr_lab.figures.style import (
    COLORS,
    LABELS,
    REFERENCE_LINE,
    add_legend,
    figure_of,
    literal,
    own_axes,
    share_legend,
    show_percent,
    styled,
)
from heapr_lab.inspection.mask_diff import (
    ScoredMask,
    overlap,
    rank_agreement_in_all,
    rank_points,
)
from heapr_lab.pruning.masks import KeepMask

_MOST_POINTS = 5_000
"""Atoms that are drawn; more would hide each other."""
_COLORS = {"neither": "#CCCCCC", "both": "#444444", "a": "#0072B2", "b": "#D55E00"}
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
    add_legend(ax)
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
    """The overlap of two masks by layer, and the ranks of their atoms.

    Args:
        a: a mask with its scores.
        b: another of the same model.

    Returns:
        Rows with shown "overlap", one for each layer: layer, and as shares of its
        atoms both, a, b (removed by one alone), expected and sd (of both, by chance).
        Rows with shown "ranks", one for each atom: layer, expert, atom, rank_a, rank_b,
        removed_by. `attrs` has `labels` of A and B, `spearman` of all atoms, whether
        ranks are `within_layer`, and those of `rank_points`.

    Raises:
        SpecError: the masks are of different models.
    """
    counts = overlap(a.keep, b.keep)
    shares = {
        "both": counts["both"],
        "a": counts["removed_a"] - counts["both"],
        "b": counts["removed_b"] - counts["both"],
        "expected": counts["expected"],
        "sd": counts["sd"],
    }
    layers = pd.DataFrame({k: n / counts["n_atoms"] for k, n in shares.items()})
    layers = layers.assign(shown="overlap", layer=counts["layer"])
    points = rank_points(a, b, most=_MOST_POINTS)
    data = pd.concat([layers, points.assign(shown="ranks")], ignore_index=True)
    data.attrs = points.attrs | {
        "labels": (a.label, b.label),
        "spearman": rank_agreement_in_all(a, b),
        "within_layer": a.within_layer or b.within_layer,
    }
    return data


@styled
def plot_mask_diff(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """The overlap by layer, or the scatter of ranks: whichever `data` has.

    Overlap: bars of what both remove, A alone and B alone; across them what both would
    remove by chance, with two standard deviations. Ranks: a point for each atom, with a
    line at each cut, where one exists.

    Args:
        data: from `mask_diff_data`, rows with one value of shown.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    if data["shown"].iloc[0] == "overlap":
        _draw_overlap(ax, data)
    else:
        _draw_ranks(ax, data)
    return ax


def _draw_overlap(ax: Axes, data: pd.DataFrame) -> None:
    names, bottom = _names(data), 0.0 * data["both"]
    for fate in ("both", "a", "b"):
        color, label = _COLORS[fate], names[fate]
        ax.bar(
            data["layer"], data[fate], bottom=bottom, width=0.8, color=color,
            label=label,
        )  # fmt: skip
        bottom = bottom + data[fate]
    chance = {"color": "black", "label": f"both, by chance ± {_N_SD} sd"}
    white = {"color": "white", "ecolor": "white", "elinewidth": 3.5}
    for size, width, line in ((9, 3.5, white), (8, 1.5, chance)):
        ax.errorbar(
            data["layer"], data["expected"], yerr=_N_SD * data["sd"], fmt="_",
            ms=size, mew=width, **line,
        )  # fmt: skip
    ax.set_ylim(0, 1.05 * max(bottom.max(), 1e-3))
    _label_shares(ax)


def _draw_ranks(ax: Axes, data: pd.DataFrame) -> None:
    names = _names(data)
    for fate, color in _COLORS.items():
        atoms = data[data["removed_by"].eq(fate)]
        ax.plot(
            atoms["rank_a"], atoms["rank_b"], ".", ms=2.5, color=color,
            label=names[fate], rasterized=True,
        )  # fmt: skip
    for side, line in (("a", ax.axvline), ("b", ax.axhline)):
        if not math.isnan(data.attrs[f"cut_{side}"]):
            line(data.attrs[f"cut_{side}"], **REFERENCE_LINE)
    where = " in the layer" if data.attrs["within_layer"] else ""
    a, b = map(literal, data.attrs["labels"])
    ax.set(xlabel=f"rank{where}, {a} [%]", ylabel=f"rank{where}, {b} [%]")
    ax.set(xlim=(0, 1), ylim=(0, 1), title=_ranks_title(data))
    for axis in (ax.xaxis, ax.yaxis):
        show_percent(axis)


def _names(data: pd.DataFrame) -> dict[str, str]:
    a, b = data.attrs["labels"]
    return {
        "neither": "kept by both",
        "both": "removed by both",
        "a": f"only by {a}",
        "b": f"only by {b}",
    }


def _ranks_title(data: pd.DataFrame) -> str:
    shown, total = len(data), data.attrs["n_atoms"]
    counted = f"{total:,}" if shown == total else f"{shown:,} of {total:,}"
    rho = data.attrs["spearman"]
    known = "" if math.isnan(rho) else f"\nSpearman ρ = {rho:.2f}"
    return f"ranks of {counted} atoms{known}"


@styled
def figure_mask_diff(data: pd.DataFrame) -> Figure:
    """Overlap by layer beside chance, and the scatter of ranks, with one legend."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.6))
    for shown, ax in zip(("overlap", "ranks"), axes, strict=True):
        plot_mask_diff(data[data["shown"].eq(shown)], ax=ax)
    axes[0].set_title("removed atomic experts")
    share_legend(figure)
    return figure
