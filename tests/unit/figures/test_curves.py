"""Curves over the ratio or the calibration size, beside the paper's points."""

import numpy as np
import pandas as pd
import pytest
from figure_rows import ROUTED_SHARE, evaluation, evaluation_rows, lines_of, saving_rows

from heapr_lab import figures
from heapr_lab.errors import SpecError

CONTEXT = "at 256 tokens of context"


def test_calibration_size_is_mean_and_spread_over_seeds():
    """Values and error bars are pandas' mean and standard deviation over seeds."""
    rng = np.random.default_rng(0)
    draws = [
        {"calibration": corpus, "n_sequences": size, "seed": seed}
        for corpus in ("pydocs", "ptb")
        for size in (8, 128)
        for seed in range(3)
    ]
    rows = [evaluation(0.2, "wikitext2", 20 + rng.normal(), **draw) for draw in draws]
    dense = evaluation(0.0, "wikitext2", 19.5, estimator="dense")
    pruned = pd.DataFrame(rows)
    data = figures.calibration_size_data(pd.DataFrame([*rows, dense]), ratio=0.2)
    expected = pruned.groupby(["calibration", "n_sequences"])["value"].agg(
        ["mean", "std"]
    )
    assert data["value"].to_numpy() == pytest.approx(expected["mean"].to_numpy())
    assert data["spread"].to_numpy() == pytest.approx(expected["std"].to_numpy())
    assert set(data["n_seeds"]) == {3}
    assert set(data["dense"]) == {19.5}
    ax = figures.plot_calibration_size(data, metric="perplexity", dataset="wikitext2")
    drawn = lines_of(ax)["calibrated on PTB"]
    rows = data[data["calibration"].eq("ptb")]
    assert drawn == pytest.approx(rows[["n_sequences", "value"]].to_numpy())
    bar = ax.containers[0].lines[2][0].get_segments()[0]
    assert bar[1, 1] - bar[0, 1] == pytest.approx(2 * rows["spread"].iloc[0])
    assert ax.get_xlabel() == "calibration [windows]"
    assert ax.get_ylabel() == "perplexity ↓"


def test_boundary_places_the_paper_on_the_axis_of_the_whole_model():
    """0.4 and 0.9 of the whole model are 0.4 / 0.75 and 0.9 / 0.75 of our atoms."""
    data = figures.boundary_data(evaluation_rows(), saving_rows())
    paper = data[data["source"].eq("paper") & data["metric"].eq("accuracy")]
    assert list(paper["ratio"]) == pytest.approx([0.4 / 0.75, 0.9 / 0.75])
    assert list(paper["parameter_reduction"]) == pytest.approx([0.4, 0.9])
    assert list(paper["relative"]) == [0.93, 0.38]
    assert list(paper["at_most"]) == [True, False]
    ax = figures.plot_boundary(data, quantity="flops_reduction")
    label = "paper: HEAPr, DeepSeekMoE-16B (not comparable: other model and data)"
    points = lines_of(ax)[label]
    assert f"FLOPs {CONTEXT}" in lines_of(ax)
    assert points == pytest.approx(np.array([[0.4 / 0.75, 0.2], [1.2, 0.55]]))
    band, *names = ax.texts
    assert band.get_text() == "out of reach\nof our model"
    assert [name.get_text() for name in names] == 2 * ["DeepSeek"]
    assert np.array([name.xy for name in names]) == pytest.approx(points)
    (top,) = ax.child_axes
    assert top.get_xlabel() == "of the whole model [%]"
    ax.figure.canvas.draw()
    assert list(top.get_xlim()) == pytest.approx(np.array(ax.get_xlim()) * ROUTED_SHARE)
    assert ax.get_ylabel() == "FLOPs saved [%] ↑"


def test_boundary_curves_are_the_evaluation_rows():
    """Perplexity is absolute on a log axis, accuracy is relative to the dense model."""
    data = figures.boundary_data(evaluation_rows(), saving_rows())
    ax = figures.plot_boundary(data, quantity="perplexity")
    # 20 · (1 + 0.1 · ratio)
    expected = [[0, 20], [0.2, 20.4], [0.5, 21]]
    assert lines_of(ax)["WikiText-2"] == pytest.approx(np.array(expected))
    assert ax.get_yscale() == "log"
    ax = figures.plot_boundary(data, quantity="accuracy")
    expected = [[0, 1], [0.2, 0.98], [0.5, 0.95]]
    assert lines_of(ax)["continuation"] == pytest.approx(np.array(expected))
    # one choice of four, where the dense model is right half the time
    assert set(lines_of(ax)["guessing"][:, 1]) == {0.5}
    assert len(figures.figure_boundary(data).axes) == 3


def test_granularity_compares_atoms_with_experts():
    """Each granularity has its own curve, and the paper's points their own marker."""
    data = figures.granularity_data(evaluation_rows(), saving_rows())
    ax = figures.plot_comparison(data, metric="perplexity", dataset="wikitext2")
    drawn = lines_of(ax)
    assert drawn["atomic experts"][-1] == pytest.approx([0.5, 1.05])
    assert drawn["whole experts"][-1] == pytest.approx([0.5, 1.2])
    paper = data[data["source"].eq("paper") & data["metric"].eq("perplexity")]
    points = paper.set_index(["name", "ratio"])["relative"]
    assert points["atom", 0.2] == pytest.approx(6.54 / 6.38)
    assert points["expert", 0.4] == pytest.approx(8.00 / 6.38)
    hollow = [line for line in ax.get_lines() if line.get_markerfacecolor() == "none"]
    assert {line.get_marker() for line in hollow} == {"o", "s"}
    assert {line.get_label().partition(",")[0] for line in hollow} == {
        "paper: atomic experts",
        "paper: whole experts",
    }
    assert [text.get_text() for text in ax.texts] == ["DeepSeek"]
    assert ax.get_ylabel() == "perplexity ÷ dense [×] ↓"
    flops = figures.plot_comparison(data, metric="flops_reduction", dataset=CONTEXT)
    assert lines_of(flops)["atomic experts"][:, 1] == pytest.approx([0, 0.08, 0.2])
    assert flops.get_title(loc="left") == "whole model, at\n256 tokens of context"


def test_scope_compares_global_with_layer_wise():
    """Curves are named by scope; the paper's are Qwen1.5-MoE's accuracies kept."""
    data = figures.scope_data(evaluation_rows())
    drawn = lines_of(
        figures.plot_comparison(data, metric="accuracy", dataset="continuation")
    )
    assert drawn["global (HEAPr-G)"][-1, 1] == pytest.approx(0.95)
    assert drawn["layer-wise (HEAPr-L)"][-1, 1] == pytest.approx(0.9)
    paper = data[data["source"].eq("paper")].set_index(["name", "ratio"])
    # means of the seven tasks as printed (the paper's own average here, 53.59, is not
    # that of its seven cells)
    pruned = (31.80 + 68.60 + 67.22 + 55.67 + 37.56 + 76.39 + 34.87) / 700
    dense = (0.31 + 0.70 + 0.66 + 0.59 + 0.40 + 0.79 + 0.35) / 7
    assert paper.loc[("global", 0.25), "relative"] == pytest.approx(pruned / dense)


def test_a_frame_that_has_too_few_or_too_many_rows_is_refused():
    """Values are relative to the dense model's, and two seeds are ambiguous."""
    results = evaluation_rows()
    with pytest.raises(SpecError, match=r"'continuation', 'accuracy'"):
        figures.main_data(results[results["estimator"].ne("dense")])
    two = pd.concat([results, results.assign(seed=1, value=results["value"] * 1.01)])
    with pytest.raises(SpecError, match=r"differ in \['seed', 'value'"):
        figures.main_data(two)
