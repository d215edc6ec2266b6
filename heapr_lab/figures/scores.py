"""Histograms of scores on a logarithmic axis, and how many of each bin are pruned."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import StepPatch

from heapr_lab.figures.style import (
    ATOM_COLOR,
    REFERENCE_GREY,
    add_legend,
    look,
    own_axes,
    styled,
)
from heapr_lab.importance.estimators import unit_of

_N_BINS = 60
_KEPT = "#CCCCCC"


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


def bin_scores(
    scores: np.ndarray, *, edge: float | None = None, bins: int = _N_BINS
) -> ScoreBins:
    """The bin of each score; the bins cover the positive scores.

    Args:
        scores: (n,), finite.
        edge: a score that is a bin edge, if it is within the range of the others.
        bins: number of bins, plus or minus one.
    """
    positive = scores[scores > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (1.0, 10.0)
    anchor = edge if edge is not None and low < edge < high else low
    below, above = (math.log(end) - math.log(anchor) for end in (low, high))
    width = max((above - below) / bins, 1e-6)
    # Half a bin of room at the top, so that no score is lost to rounding.
    places = np.arange(
        math.floor(below / width), math.floor(above / width + 0.5) + 2, dtype=float
    )
    edges = np.exp(math.log(anchor) + width * places)
    edges[places == 0] = anchor
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
    numbers = np.searchsorted(edges, scores, side="right") - 1
    numbers = np.minimum(numbers, len(edges) - 2)  # the last bin has its upper edge
    numbers[scores <= 0] = len(edges) - 1
    return ScoreBins(edges, numbers.astype(np.min_scalar_type(len(edges))))


@styled
def plot_score_histogram(
    scores: pd.Series, cut: float, *, ax: Axes | None = None
) -> Axes:
    """Histogram of the scores on a logarithmic axis, removed atoms in another colour.

    Args:
        scores: one score per atomic expert; the name of the series is the estimator.
        cut: the score below which atoms are removed, drawn as a line; it is a bin edge,
            so that no bin contains both removed and kept atoms.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    values, estimator = scores.to_numpy(dtype=float), str(scores.name)
    binned = bin_scores(values, edge=cut)
    picture = ScorePicture(own_axes(ax))
    picture.show(
        binned.edges,
        binned.counts(),
        name=f"score, {look(estimator).label} [{unit_of(estimator)}]",
        hidden=binned.n_not_positive,
    )
    picture.remove(binned.counts(values < cut))
    add_legend(picture.ax)
    return picture.ax


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
