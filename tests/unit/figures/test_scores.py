"""Histograms of scores: every score is counted once, and drawn where it is."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from heapr_lab import figures
from heapr_lab.figures.scores import ScorePicture, bin_scores


def lognormal(n: int) -> np.ndarray:
    """Scores over some orders of magnitude."""
    return np.random.default_rng(0).lognormal(sigma=2, size=n)


def test_bins_are_those_of_numpy():
    """Each score is in the bin where numpy counts it; those not above 0 in none."""
    scores = np.array([0.0, -1.0, *lognormal(1000)])
    binned = bin_scores(scores, bins=80)
    counts = np.histogram(scores[scores > 0], bins=binned.edges)[0]
    assert binned.counts().tolist() == counts.tolist()
    assert counts.sum() == 1000
    assert binned.n_not_positive == 2
    steps = np.diff(np.log(binned.edges))
    assert steps[1:-1] == pytest.approx(steps[1])
    assert len(steps) == 81
    some = scores > 2
    counts = np.histogram(scores[some], bins=binned.edges)[0]
    assert binned.counts(some).tolist() == counts.tolist()


def test_bins_reach_over_all_scales():
    """Scores may have a quotient that is no float64, or none may be above 0."""
    binned = bin_scores(np.array([1e-300, 1.0, 1e200]), bins=10)
    assert binned.counts().sum() == 3
    assert binned.counts()[0] == binned.counts()[-2:].sum() == 1
    assert bin_scores(np.zeros(3), bins=10).counts().sum() == 0
    assert bin_scores(np.full(7, 0.3), bins=10).counts().sum() == 7


def test_a_picture_shows_what_it_was_given_last():
    """Whatever was shown before; a line is above the removed, and zeros are counted."""
    scores = np.array([0.0, 0.0, *lognormal(1000)])
    binned = bin_scores(scores, bins=60)
    picture = figures.styled(lambda: ScorePicture(plt.subplots()[1]))()
    picture.show(np.array([1.0, 2.0]), np.ones(1), name="score", hidden=0)
    picture.remove(np.ones(1))
    hidden = binned.n_not_positive
    picture.show(binned.edges, binned.counts(), name="score [nats]", hidden=hidden)
    assert picture.ax.get_legend_handles_labels()[1] == ["kept"]
    assert not picture.cut.get_visible()
    gone = (scores > 0) & (scores < 2)
    picture.remove(binned.counts(gone))
    every, removed = (stairs.get_data().values.sum() for stairs in picture.ax.patches)
    assert (every, removed) == (1000, gone.sum())
    (cut,) = set(picture.cut.get_xdata())
    assert cut == min(edge for edge in binned.edges if edge >= 2)
    assert picture.cut.get_visible()
    assert picture.ax.get_legend_handles_labels()[1] == ["kept", "removed"]
    assert picture.ax.get_title(loc="left") == "not shown: 2 with a score of 0 or less"
    assert picture.ax.get_xlabel() == "score [nats]"
    assert picture.ax.get_xlim() == (binned.edges[0], binned.edges[-1])
