"""Compression methods side by side: rows, lines with names, the front, and tables."""

import numpy as np
import pandas as pd
import pytest
import torch
from figure_rows import measured_methods, real_row

from benchmarks.figures import methods
from benchmarks.index import results_of
from benchmarks.similarity import mean_cosine
from heapr_lab import figures
from heapr_lab.figures.style import PAPER_GREY


def at(data: pd.DataFrame, variant: str, ratio: float) -> pd.Series:
    """The row of one method and ratio."""
    rows = data[data["variant"].eq(variant) & data["ratio"].eq(ratio)]
    assert len(rows) == 1
    return rows.iloc[0]


def test_rows_are_over_models():
    """HEAPr at 25 %: (0.1 + 0.3) / 2 on pydocs, 3 · (0.1 + 0.3) / 2 on the others.

    Draws of one model, on the same test windows, have the error of one.
    """
    draws = pd.concat([measured_methods(), measured_methods().assign(draw=1)])
    row = at(methods.methods_data(draws), "heapr", 0.25)
    assert row["group"] == "atoms"
    assert row["n_models"] == 2
    assert row["n_refused"] == 0
    expected = {
        "pooled": 0.2,
        "worst": 0.3,
        "stderr": np.hypot(0.01, 0.03) / 2,
        "other": 0.6,
        "agreement": 0.75,
        "parameters_saved": 0.125,
        "routed_flops_saved": 0.25,
        "fit_seconds": 8.0,
        "fit_peak_bytes": 2e6,
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(value), name


def test_what_a_model_refuses_is_counted():
    """REAP at 50 % is of one model alone: in the rows, and best of nothing."""
    data = methods.methods_data(measured_methods())
    row = at(data, "reap", 0.5)
    assert (row["n_models"], row["n_refused"]) == (1, 1)
    assert row["pooled"] == pytest.approx(0.6)
    assert not data[data["group"].eq("experts")]["best"].any()


def test_a_kind_is_at_one_ratio_of_the_pretrained_moe():
    """That at which most of its methods were measured, and of two the larger."""
    rows = pd.DataFrame(
        [
            real_row("heapr", 0.2),
            real_row("heapr", 0.4),
            real_row("compress", 0.2),
            real_row("reap", 0.1),
            real_row("reap", 0.3),
        ]
    )
    data = methods.with_pretrained(methods.methods_data(measured_methods()), rows)
    at_half = data[data["ratio"].eq(0.25)].set_index("variant")
    expected = {"heapr": 0.2, "compress": 0.2, "reap": 0.3}
    assert at_half["pretrained"].dropna().to_dict() == expected
    assert at_half["pretrained_ratio"].dropna().to_dict() == expected
    assert at_half.loc["heapr", "pretrained_stderr"] == pytest.approx(0.02)
    title = methods.figure_methods(data).axes[1].get_title(loc="left")
    assert title == "smolmoe, 30% removed;\n20% (atoms)"


def test_every_method_is_a_row_below_its_kind():
    """Best first, with the worst model."""
    rows = pd.DataFrame([real_row("heapr", 0.2)])
    data = methods.with_pretrained(methods.methods_data(measured_methods()), rows)
    assert set(data.loc[data["best"], "variant"]) == {"compress"}
    losses, others, seconds = methods.figure_methods(data).axes
    assert [0.2, 2] in (line.get_xydata()[0].tolist() for line in others.get_lines())
    ticks = losses.get_yticklabels()
    rows = [tick.get_text() for tick in ticks]
    assert rows == ["atoms", "compress", "heapr", "random", "experts", "reap"]
    colors = [tick.get_color() for tick in ticks[1:4]]
    ours = [figures.look(name).color for name in ("compress", "heapr")]
    assert colors == [*ours, PAPER_GREY]
    hollow = [x for x in losses.get_lines() if x.get_markerfacecolor() == "white"]
    row = at(data, "heapr", 0.25)
    assert hollow[1].get_xydata().tolist() == [[row["worst"], 2]]
    spent = [line.get_xydata().tolist() for line in seconds.get_lines()]
    assert [row["fit_seconds"], 2] in (point for (point,) in spent)


def test_the_front_is_of_methods_that_none_beats():
    """Random, then REAP, HEAPr and compress: each is slower and better."""
    data = methods.method_costs_data(measured_methods())
    order = ["random", "reap", "heapr", "compress"]
    assert data["variant"].tolist() == order
    assert data["efficient"].all()
    slow = measured_methods()
    slow.loc[slow["variant"].eq("reap"), "fit_seconds"] *= 10
    data = methods.method_costs_data(slow).set_index("variant")
    assert data["efficient"].to_dict() == {
        "random": True,
        "heapr": True,
        "compress": True,
        "reap": False,
    }
    ax = methods.plot_method_costs(data.reset_index())
    assert {text.get_text() for text in ax.texts} == set(order) - {"reap"}


def test_published_rows_are_marked_and_ranked_beside_ours():
    """NAEE is behind HEAPr in the paper; here it is made to be in front."""
    published = methods.published_table()
    assert published["source"].eq("published, not measured here").all()
    assert published.query("method == 'Original'")["relative"].eq(1).all()
    measured = measured_methods()
    reap = measured["variant"].eq("reap")
    measured = measured[~(reap & measured["ratio"].eq(0.5))].copy()
    measured.loc[reap, "variant"] = "naee"
    measured.loc[reap, "delta_nll pydocs"] = 0.001
    table = methods.rankings_table(methods.methods_data(measured))
    assert set(table["method"]) == {"naee", "heapr"}
    ranks = table[table["published ratio"].eq(0.2)].set_index("method")
    assert ranks.loc["heapr", ["rank there", "rank here"]].tolist() == [1, 2]
    assert ranks.loc["naee", "published perplexity ÷ dense ↓"] == pytest.approx(
        9.44 / 6.38
    )
    assert not ranks["same rank"].any()
    alone = measured[measured["variant"].eq("random")]
    assert methods.rankings_table(methods.methods_data(alone)).empty


def test_alike_experts_stand_beside_what_merging_loses():
    """Copies of one expert are alike, others are not; a row for each model of both."""
    table = methods.merging_table(
        results_of("similarity"), results_of("methods"), ratio=0.4
    )
    cosines = table.set_index("model")["cosine of two experts' weights"]
    means = cosines.str.split().str[0].astype(float)
    assert means["upcycled"] > 0.5 > 0.1 > means.drop("upcycled").max()
    assert table["merging random groups"].gt(0).all()


def test_the_mean_cosine_of_pairs():
    """Orthogonal, opposite and equal vectors, of any length."""
    for second, expected in (([0.0, 2.0], 0.0), ([-3.0, 0.0], -1.0), ([5.0, 0.0], 1.0)):
        vectors = torch.tensor([[[1.0, 0.0]], [second]])
        assert mean_cosine(vectors) == pytest.approx(expected)
