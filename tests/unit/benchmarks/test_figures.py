"""Figures and tables of the benchmarks, from small results."""

import numpy as np
import pandas as pd
import pytest
from figure_rows import lines_of, measured_models

from benchmarks.figures import cost, quality, streaming
from benchmarks.index import BENCHMARKS, results_of
from benchmarks.quality import PASSES
from heapr_lab.errors import SpecError
from heapr_lab.experiments import paper
from heapr_lab.storage import paths


def test_no_quotient_is_that_of_noise():
    """At 10 % HEAPr loses 1.9 standard errors on the mean: the table has no ratio."""
    rows = measured_models().query("ratio == 0.4")
    paper = rows.loc[rows["variant"].eq(quality.PAPER), "delta_nll"]
    error = paper.sum() / 1.9 / len(paper) ** 0.5
    few = rows.assign(ratio=0.1, delta_nll_stderr=error, passes=9)
    measured = pd.concat([rows, few], ignore_index=True)
    table = quality.models_table(quality.models_data(measured))
    names = [name for name in table if name.endswith("% [× HEAPr] ↓")]
    assert names[0] == "40 % [× HEAPr] ↓"
    assert not table.isna().all().any()


@pytest.mark.parametrize("name", ["5_granularity", "6_scope", "8_methods"])
def test_curves_that_are_compared_have_the_same_ratios(name):
    """A curve with more points bends where the straight line of another does not."""
    data = pd.read_csv(paths.figures_dir() / "data" / f"{name}.csv")
    ours = data[data["source"].eq("ours")]
    counts = ours.groupby(["metric", "dataset", "name"])["ratio"].nunique()
    assert set(counts) == {1 + len(paper.METHOD_RATIOS)}


def test_committed_passes_are_those_that_are_counted():
    """The table and docs/method.md have one number for `compress`."""
    rows = results_of("quality")
    passes = rows.loc[rows["variant"].eq("compress"), "passes"]
    assert set(passes) == {PASSES["compress"]}


def test_what_compress_costs_is_the_sum_of_its_parts():
    """Of three quarters of the windows scores and twice sums, of an eighth 7 losses.

    One pass with gradients and one without are over a sixteenth, for the steps. Where
    HEAPr's mask is returned, there are none, and scores of the last quarter replace
    four of the losses.
    """
    rows = results_of("solves")
    rows = rows[rows["extrapolated"]]
    assert len(rows) == 4
    solves = rows["elimination"] + 2 * rows["compensation"]
    seconds = 0.75 * (rows["scores"] + 2 * rows["sums"]) + 3 / 8 * rows["losses"]
    decided = (seconds + solves) / rows["scores"]
    more = 1 / 16 * (rows["scores"] + rows["losses"]) + 4 / 8 * rows["losses"]
    quotients = decided + more / rows["scores"]
    assert rows["compress ÷ scores"].tolist() == pytest.approx(quotients.tolist())
    worst = (decided + 0.25).tolist()
    assert rows["with HEAPr's mask"].tolist() == pytest.approx(worst)
    assert max(*quotients, *worst) <= 2


def test_a_caption_names_the_models_that_are_drawn():
    """Each has a panel."""
    row = BENCHMARKS["quality"]
    panels = quality.figure_models(row.data(row.rows())).axes
    titles = [ax.get_title(loc="left") for ax in panels]
    assert row.measured_on(row.rows()).startswith(", ".join(titles) + ";")


def test_gains_are_drawn_with_their_intervals():
    """The quotients of the table by model, a panel each; none without a loss."""
    rows = measured_models()
    figure = quality.figure_models(quality.models_data(rows))
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["a", "b"]
    drawn = [lines_of(ax)["compress"] for ax in figure.axes]
    assert drawn[0].tolist() == pytest.approx(np.array([[20, 0.5], [40, 0.3]]))
    assert np.isnan(drawn[1][0, 1])
    assert drawn[1][1].tolist() == pytest.approx([40, 0.5])
    # A second draw of the calibration windows makes no error smaller.
    twice = pd.concat([rows, rows.assign(seed=1)])
    for plot in (figure, quality.figure_models(quality.models_data(twice))):
        (bars,) = plot.axes[0].containers[-1].lines[2]
        low, high = bars.get_segments()[1][:, 1]
        assert high - low == pytest.approx(2 * 0.196)


def test_streaming_is_drawn_by_quantity():
    """Two bars of memory for each run; the bars of the stages end to end."""
    stages = ("identity", "scores", "loss", "masked loss", "pruning", "pruned loss")
    ways = {"way": ["streamed", "in memory"], "peak_bytes": [1.5e9, 9e9]}
    times = {name: 2.0 + number for number, name in enumerate(stages)}
    runs = pd.DataFrame(ways).assign(model="m", checkpoint_bytes=3e9, **times)
    data = streaming.streaming_data(runs)
    memory = streaming.plot_streaming(data, quantity="memory").patches
    assert [bar.get_width() for bar in memory] == [3.0, 3.0, 1.5, 9.0]
    assert {bar.get_x() for bar in memory} == {0.0}
    ax = streaming.plot_streaming(data, quantity="time")
    first = ax.patches[::2]
    assert [bar.get_x() for bar in first] == [0.0, 2.0, 5.0, 21.0]
    assert first[-1].get_x() + first[-1].get_width() == sum(range(2, 8))
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "m, streamed",
        "m, in memory",
    ]


def test_costs_are_drawn_if_there_is_something_to_compare_with():
    """Seconds of each method; the paper's have no bar."""
    rows = pd.DataFrame({"method": ["plain", "one_pass"], "seconds": [10.0, 12.0]})
    rows = rows.assign(model="lab", peak_bytes=2 * 2**20, state_bytes=2**20)
    rows = rows.assign(d_model=8, d_inter=4, n_experts=2)
    ax = cost.plot_cost(cost.cost_data(rows), quantity="seconds")
    assert [bar.get_width() for bar in ax.patches] == [10, 12]
    assert ax.get_xlabel() == "time [s] ↓"
    with pytest.raises(SpecError, match="no row of baseline 'plain'"):
        cost.cost_data(rows[rows["method"].ne("plain")])
