"""Histograms of scores: every score is counted once, and drawn where it is."""

import numpy as np
import pandas as pd
import pytest

from heapr_lab import figures
from heapr_lab.errors import SpecError


def test_score_histogram_counts_every_positive_score_once() -> None:
    """Counts add up, the cut parts them exactly, and zeros are reported."""
    values = np.random.default_rng(0).lognormal(sigma=2, size=1000)
    scores = pd.Series([0.0, 0.0, *values], name="heapr")
    cut = float(np.sort(values)[250])
    data = figures.score_histogram_data(scores, cut)
    assert data["n_atoms"].sum() == 1000
    assert data.attrs["n_not_positive"] == 2
    assert data.loc[data["removed"], "n_atoms"].sum() == (values < cut).sum() == 250
    ax = figures.plot_score_histogram(scores, cut)
    assert sum(bar.get_height() for bar in ax.patches) == 1000
    assert ax.get_xlabel() == "score, HEAPr [nats per routed token]"
    with pytest.raises(SpecError, match="none of 2 scores is above 0"):
        figures.score_histogram_data(pd.Series([0.0, 0.0]))


def test_score_histogram_of_equal_scores_has_them_all() -> None:
    """One value, repeated, is one full bin."""
    data = figures.score_histogram_data(pd.Series([0.3] * 7))
    assert data["n_atoms"].sum() == 7
