"""Figure 2: points, and Spearman's correlation with its interval."""

import numpy as np
import pandas as pd
import pytest
from figure_rows import bins_frame

from heapr_lab import figures
from heapr_lab.figures.scores import spearman_interval


def test_spearman_lies_in_its_interval_which_is_seeded():
    """ρ is that of the formula, and the interval is always the same."""
    data = figures.bins_data(bins_frame())
    spearman = data.groupby("order")[["rho", "rho_low", "rho_high"]].first().T.to_dict()
    # 1 − 6 Σd² / (n (n² − 1)) with Σd² = 2 and n = 10
    assert spearman["index"]["rho"] == pytest.approx(1 - 12 / 990)
    assert spearman["index"]["rho_low"] < spearman["index"]["rho"]
    assert spearman["index"]["rho_high"] <= 1 + 1e-12
    pd.testing.assert_frame_equal(figures.bins_data(bins_frame()), data)
    assert spearman["score"] == pytest.approx({"rho": 1, "rho_low": 1, "rho_high": 1})


def test_spearman_of_unrelated_numbers_has_an_interval_around_zero():
    """The interval covers 0 where there is nothing to see, and is wide."""
    rng = np.random.default_rng(0)
    x, y = pd.Series(rng.normal(size=10)), pd.Series(rng.normal(size=10))
    interval = spearman_interval(x, y)
    assert interval["rho_low"] < 0 < interval["rho_high"]
    assert interval["rho_high"] - interval["rho_low"] > 0.5


def test_bins_are_drawn_where_they_were_measured():
    """Points are (summed score, Δloss); ρ and its interval stand in the panel."""
    data = figures.bins_data(bins_frame())
    ax = figures.plot_bins(data, order="index")
    rows = data[data["order"].eq("index")]
    drawn = ax.get_lines()[0].get_xydata()
    assert drawn == pytest.approx(rows[["score_sum", "delta_nll"]].to_numpy())
    assert "[nats per routed token]" in ax.get_xlabel()
    assert "[nats per token]" in ax.get_ylabel()
    texts = " ".join(text.get_text() for text in ax.texts)
    assert "ρ = 0.99" in texts
    assert "95 % interval" in texts
    costliest = rows.loc[rows["delta_nll"].idxmax()]
    times = costliest["delta_nll"] / costliest["score_sum"]
    assert f"{costliest['bin']}: {times:.1f} × its score" in texts
    assert ax.get_xscale() == "log"
