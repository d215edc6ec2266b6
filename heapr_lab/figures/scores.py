"""Scores: figure 2, whether their sum predicts the loss increase; and a histogram.

The histogram, which the panel shows, is on a logarithmic axis, and shows how many of
each bin are pruned.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.ticker import LogLocator, NullFormatter

from heapr_lab.figures.curves import matching, require_one_row
from heapr_lab.figures.style import (
    ATOM_COLOR,
    LABELS,
    REFERENCE_GREY,
    REFERENCE_LINE,
    figure_of,
    look,
    name_points,
    own_axes,
    styled,
)
from heapr_lab.importance.estimators import unit_of

ORDERS = {"index": "bins by original index", "score": "bins by score rank"}
_INTERVAL = 0.95
_N_RESAMPLES = 5000
_KEPT = "#CCCCCC"


def bins_data(bins: pd.DataFrame) -> pd.DataFrame:
    """Predicted and measured loss change per bin, with Spearman's correlation.

    Args:
        bins: one row per order and bin: order, bin, score_sum, delta_nll, estimator,
            dataset.

    Returns:
        The rows sorted by order and bin, with rho, rho_low and rho_high (95 %
        percentile interval) of their order.

    Raises:
        SpecError: a bin has several rows, as of several data sets.
    """
    rows = require_one_row(bins, ["order", "bin"]).sort_values(["order", "bin"])
    orders = [
        group.assign(**spearman_interval(group["score_sum"], group["delta_nll"]))
        for _, group in rows.groupby("order")
    ]
    return pd.concat(orders, ignore_index=True)


def spearman_interval(x: pd.Series, y: pd.Series) -> dict[str, float]:
    """Spearman's correlation and the percentile interval of its bootstrap.

    Pairs are resampled with replacement; resamples in which x or y is constant have no
    correlation and are ignored.

    Returns:
        rho, rho_low and rho_high.
    """
    pairs = np.stack([np.asarray(x, dtype=float), np.asarray(y, dtype=float)])
    rng = np.random.default_rng(0)
    picks = rng.integers(pairs.shape[1], size=(_N_RESAMPLES, pairs.shape[1]))
    # row 0 is the sample itself
    picks = np.vstack([np.arange(pairs.shape[1]), picks])
    ranks = [pd.DataFrame(values[picks]).rank(axis=1).to_numpy() for values in pairs]
    centred = [rank - rank.mean(axis=1, keepdims=True) for rank in ranks]
    spread = np.sqrt((centred[0] ** 2).sum(axis=1) * (centred[1] ** 2).sum(axis=1))
    product = (centred[0] * centred[1]).sum(axis=1)
    rho = np.divide(product, spread, out=np.full_like(spread, np.nan), where=spread > 0)
    tail = (1 - _INTERVAL) / 2
    drawn = rho[1:][~np.isnan(rho[1:])]
    low, high = np.quantile(drawn, [tail, 1 - tail]) if len(drawn) else (np.nan, np.nan)
    return {"rho": float(rho[0]), "rho_low": float(low), "rho_high": float(high)}


@styled
def plot_bins(data: pd.DataFrame, *, order: str, ax: Axes | None = None) -> Axes:
    """Measured against predicted loss change, one point per bin of 10 % of the atoms.

    Each point is labelled with the number of its bin; on the dashed line the loss is
    the score. The costliest bin also says how many times its score it costs. Axes are
    logarithmic (linear around 0 where a measured change is not positive).

    Args:
        data: from `bins_data`.
        order: "index" or "score".
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    rows = matching(data, {"order": order})
    estimator = str(rows["estimator"].iloc[0])
    shown = look(estimator)
    ax = own_axes(ax)
    ax.plot(
        rows["score_sum"],
        rows["delta_nll"],
        linestyle="none",
        marker=shown.marker,
        color=shown.color,
        label=f"a tenth of the atomic experts, by {shown.label}; 0 is the first",
    )
    ends = [rows["score_sum"].min(), rows["score_sum"].max()]
    ax.plot(ends, ends, label="as much as its score", **REFERENCE_LINE)
    _use_log_axes(ax, rows)
    first = rows.iloc[0]
    note = (
        f"Spearman ρ = {first['rho']:.2f}, "
        f"95 % interval [{first['rho_low']:.2f}, {first['rho_high']:.2f}]"
    ).replace("-", "−")
    # the second line of the title, in regular type
    ax.set_title(ORDERS[order] + "\n")
    ax.text(0, 1.03, note, transform=ax.transAxes, fontsize=8)
    ax.margins(0.1)
    name_points(ax, _bin_names(rows))
    ax.set_xlabel(f"summed score [{unit_of(estimator)}]")
    ax.set_ylabel(LABELS["delta_nll"])
    return ax


def _bin_names(rows: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Number and place of each bin; the costliest with the multiple of its score."""
    costliest = rows["delta_nll"].idxmax()
    names = {}
    for row in rows.itertuples():
        name = str(row.bin)
        if row.Index == costliest and row.score_sum > 0:
            name += f": {row.delta_nll / row.score_sum:.1f} × its score"
        names[name] = (row.score_sum, row.delta_nll)
    return names


def _use_log_axes(ax: Axes, rows: pd.DataFrame) -> None:
    scores, losses = rows["score_sum"], rows["delta_nll"]
    if scores.gt(0).all():
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    if losses.gt(0).all():
        ax.set_yscale("log")
    elif losses.gt(0).any():
        ax.set_yscale("symlog", linthresh=losses[losses.gt(0)].min())


@styled
def figure_bins(data: pd.DataFrame) -> Figure:
    """Bins by original index (as in the paper) and by score rank, side by side."""
    return figure_of(
        ORDERS, lambda order, ax: plot_bins(data, order=order, ax=ax), height=3.0
    )


# --- histogram ----------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreBins:
    """Bins of equal width on a logarithmic axis, and the bin of each score."""

    edges: np.ndarray
    """(n_bins + 1,), increasing."""
    numbers: np.ndarray
    """Index of the bin of each score, from 0; n_bins if the score is not above 0."""

    @property
    def n_not_positive(self) -> int:
        """Number of scores that have no logarithm."""
        return int((self.numbers == len(self.edges) - 1).sum())

    def counts(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Scores in each bin, (n_bins,).

        Args:
            chosen: which scores are counted, bool, one for each; None counts all.
        """
        numbers = self.numbers if chosen is None else self.numbers[chosen]
        return np.bincount(numbers, minlength=len(self.edges))[:-1]


def bin_scores(scores: np.ndarray, *, bins: int) -> ScoreBins:
    """The bin of each score; the bins cover the positive scores.

    Args:
        scores: (n,), finite.
        bins: number of bins in which the highest score would be an edge; there is one
            more, or fewer if the scores are almost equal.
    """
    positive = scores[scores > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (1.0, 10.0)
    span = math.log(high) - math.log(low)
    width = max(span / bins, 1e-6)
    # Half a bin of room at the top, so that no score is lost to rounding.
    places = np.arange(math.floor(span / width + 0.5) + 2)
    edges = np.exp(math.log(low) + width * places)
    edges[0], edges[-1] = low, max(edges[-1], high)
    numbers = np.searchsorted(edges, scores, side="right") - 1
    numbers = np.minimum(numbers, len(edges) - 2)  # the last bin has its upper edge
    numbers[scores <= 0] = len(edges) - 1
    return ScoreBins(edges, numbers.astype(np.min_scalar_type(len(edges))))


class ScorePicture:
    """A histogram on one Axes that is drawn once and then updated in place.

    Removed scores are drawn in front of all scores.

    Attributes:
        ax: where it is drawn.
        removed: the bars of the removed scores.
        cut: the line at the upper edge of the last bin with removed scores.
    """

    def __init__(self, ax: Axes) -> None:
        """Create the artists that `show` and `remove` update."""
        self.ax = ax
        self._every = self._stairs(_KEPT, "kept")
        self.removed = self._stairs(ATOM_COLOR, "removed")
        self.cut = ax.axvline(1, color=REFERENCE_GREY, linestyle="--", linewidth=1.2)
        self._note = ax.set_title("", fontsize=8, fontweight="normal")
        ax.set_xscale("log")

    def _stairs(self, color: str, label: str) -> StepPatch:
        return self.ax.stairs([0], [1, 10], fill=True, color=color, label=label)

    def show(
        self,
        edges: np.ndarray,
        counts: np.ndarray,
        *,
        name: str,
        hidden: int,
        counted: str = "atomic experts",
    ) -> None:
        """Show other scores, none of them removed.

        Args:
            edges: edges of the bins, (n_bins + 1,).
            counts: number of scores in each bin, (n_bins,).
            name: the name of the scores, with their unit.
            hidden: number of scores that are not on the axis.
            counted: what is scored.
        """
        self._every.set_data(counts, edges)
        self.remove(np.zeros_like(counts))
        self.ax.set_xlim(edges[0], edges[-1])
        self.ax.set_ylim(0, 1.05 * max(1, counts.max()))
        self.ax.set_xlabel(name)
        self.ax.set_ylabel(f"{counted} [count]")
        note = f"not shown: {hidden:,} with a score of 0 or less" if hidden else ""
        self._note.set_text(note)

    def remove(self, counts: np.ndarray) -> None:
        """Show the number of removed scores in each bin, (n_bins,)."""
        _, edges, _ = self._every.get_data()
        self.removed.set_data(counts, edges)
        gone = np.flatnonzero(counts)
        self.removed.set_label("removed" if len(gone) else "_removed")
        self.cut.set_visible(len(gone) > 0)
        if len(gone):
            self.cut.set_xdata([edges[gone[-1] + 1]] * 2)
