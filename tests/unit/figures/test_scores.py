"""Histograms of scores: every score is counted once, and drawn where it is."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from heapr_lab import figures
from heapr_lab.figures.scores import ScorePicture, bin_scores


def lognormal(n: int) -> np.ndarray:
    """Scores over some orders of magnitude."""
    return np.random.default_rng(0).lognormal(sigma=2, size=n)


@pytest.mark.parametrize("edge", [None, 1.0, 1e9])
def test_bins_are_those_of_numpy(edge):
    """Each score is in the bin where numpy counts it; those not above 0 in none."""
    scores = np.array([0.0, -1.0, *lognormal(1000)])
    binned = bin_scores(scores, edge=edge, bins=80)
    counts = np.histogram(scores[scores > 0], bins=binned.edges)[0]
    assert binned.counts().tolist() == counts.tolist()
    assert counts.sum() == 1000
    assert binned.n_not_positive == 2
    steps = np.diff(np.log(binned.edges))
    assert steps[1:-1] == pytest.approx(steps[1])
    assert len(steps) in (80, 81, 82)
    some = scores > 2
    counts = np.histogram(scores[some], bins=binned.edges)[0]
    assert binned.counts(some).tolist() == counts.tolist()
    assert (edge in binned.edges) == (edge == 1.0)


def test_bins_reach_over_all_scales():
    """Scores may have a quotient that is no float64, or none may be above 0."""
    binned = bin_scores(np.array([1e-300, 1.0, 1e200]), bins=10)
    assert binned.counts().sum() == 3
    assert binned.counts()[0] == binned.counts()[-2:].sum() == 1
    assert bin_scores(np.zeros(3)).counts().sum() == 0
    assert bin_scores(np.full(7, 0.3)).counts().sum() == 7


def test_score_histogram_counts_every_positive_score_once():
    """Counts add up, the cut parts them exactly, and zeros are reported."""
    values = lognormal(1000)
    scores = pd.Series([0.0, 0.0, *values], name="heapr")
    cut = float(np.sort(values)[250])
    ax = figures.plot_score_histogram(scores, cut)
    every, removed = (stairs.get_data().values.sum() for stairs in ax.patches)
    assert (every, removed) == (1000, 250)
    assert set(ax.get_lines()[0].get_xdata()) == {cut}
    assert ax.get_title(loc="left") == "not shown: 2 with a score of 0 or less"
    assert ax.get_xlabel() == "score, HEAPr [nats per routed token]"


def test_score_histogram_with_nothing_removed():
    """It is not in the legend, and no line is seen; the estimator may be unknown."""
    ax = figures.plot_score_histogram(pd.Series(lognormal(50), name="of my own"), 0.0)
    assert ax.get_legend_handles_labels()[1] == ["kept"]
    assert not ax.get_lines()[0].get_visible()
    assert ax.get_xlabel() == "score, of my own [arbitrary unit]"
    assert ax.get_title(loc="left") == ""


def test_a_picture_that_was_changed_is_the_one_drawn_anew():
    """Whatever was shown before, and outside of the house style too."""
    scores = pd.Series([0.0, *lognormal(200)], name="fisher")
    anew = figures.plot_score_histogram(scores, 2.0)
    picture = figures.styled(lambda: ScorePicture(plt.subplots()[1]))()
    picture.show(np.array([1.0, 2.0]), np.ones(1), name="score", hidden=0)
    binned = bin_scores(scores.to_numpy(), edge=2.0)
    counts, hidden = binned.counts(), binned.n_not_positive
    name = anew.get_xlabel()
    picture.show(binned.edges, counts, name=name, hidden=hidden)
    picture.remove(binned.counts(scores.to_numpy() < 2.0))
    for one, other in zip(picture.ax.patches, anew.patches, strict=True):
        for mine, theirs in zip(one.get_data()[:2], other.get_data()[:2], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert picture.cut.get_xdata() == list(anew.get_lines()[0].get_xdata())
    for text in ("get_xlabel", "get_ylabel", "get_xlim", "get_ylim"):
        assert getattr(picture.ax, text)() == getattr(anew, text)()
    for place in ("left", "center"):
        assert picture.ax.get_title(place) == anew.get_title(place)
