"""What masks remove: bars are shares of layers, points are atoms at their ranks."""

import numpy as np
import pytest
from figure_rows import keep_of, scored_masks

from heapr_lab import figures
from heapr_lab.inspection.mask_diff import ScoredMask


def test_layer_bars_are_the_removed_shares():
    """Bars are the layers' shares in per cent, the line is the global ratio."""
    data = figures.layer_ratios_data({0.25: keep_of(4, 1), 0.5: keep_of(7, 3)})
    ax = figures.plot_layer_ratios(data[data["ratio"].eq(0.25)])
    assert [bar.get_height() for bar in ax.patches] == [0.4, 0.1]
    assert [bar.get_center()[0] for bar in ax.patches] == pytest.approx([1, 2])
    assert set(ax.get_lines()[0].get_ydata()) == {0.25}
    assert ax.get_ylabel() == "removed [% of the layer]"
    assert ax.yaxis.get_major_formatter()(0.4, 0) == "40"
    assert len(figures.figure_layer_ratios(data).axes) == 2


def test_bars_stack_up_to_what_either_removes():
    """Atoms of both are at the bottom, then A's, then B's; chance stands on its own."""
    data = figures.mask_diff_data(*scored_masks())
    layers = data[data["shown"].eq("overlap")]
    assert layers["layer"].tolist() == [2, 5]
    ax = figures.plot_mask_diff(layers)
    tops = [bar.get_y() + bar.get_height() for bar in ax.patches]
    assert tops == pytest.approx([2 / 4, 0, 3 / 4, 0, 1, 2 / 6])
    # Of 4 atoms, 3 of A and 3 of B: both 9/4, variance 9/4 · 1 · 1 / (4 · 3)
    *_, chance = ax.containers
    line, _, (bars,) = chance.lines
    assert line.get_ydata().tolist() == pytest.approx([9 / 16, 0])
    (first, _) = bars.get_segments()
    assert np.ptp(first[:, 1]) == pytest.approx(4 * np.sqrt(9 / 48) / 4)
    assert ax.get_ylabel() == "removed [% of the layer]"


def test_points_stand_at_their_ranks_in_the_colour_of_their_fate():
    """A's cut is a line; B, which keeps atoms below others it removes, has none."""
    data = figures.mask_diff_data(*scored_masks())
    ax = figures.plot_mask_diff(data[data["shown"].eq("ranks")])
    drawn = {line.get_label(): line for line in ax.get_lines()}
    xs = [round(10 * x) for x in drawn["removed by both"].get_xdata()]
    assert xs == [2, 3]
    assert [round(10 * y) for y in drawn["removed by both"].get_ydata()] == [9, 8]
    assert [round(10 * x) for x in drawn["only by A"].get_xdata()] == [1]
    assert [round(10 * x) for x in drawn["only by B"].get_xdata()] == [4, 5, 8]
    assert len(drawn["kept by both"].get_xdata()) == 4
    cuts = [line for line in ax.get_lines() if line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in cuts] == [[0.3, 0.3]]
    assert ax.get_title("left") == "ranks of 10 atoms\nSpearman ρ = -1.00"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("rank, A [%]", "rank, B [%]")


def test_a_sample_says_of_how_many_it_is(monkeypatch):
    """The title says it; ranks within layers are named as such."""
    monkeypatch.setattr("heapr_lab.figures.masks._MOST_POINTS", 4)
    a, b = scored_masks()
    inside = ScoredMask("B", b.keep, b.scores, within_layer=True)
    data = figures.mask_diff_data(a, inside)
    ax = figures.plot_mask_diff(data[data["shown"].eq("ranks")])
    assert ax.get_title("left").startswith("ranks of 4 of 10 atoms\n")
    assert ax.get_xlabel() == "rank in the layer, A [%]"


def test_the_figure_has_both_and_each_label_once():
    """One legend, and everything within the page."""
    figure = figures.figure_mask_diff(figures.mask_diff_data(*scored_masks()))
    assert len(figure.axes) == 2
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    fates = ["removed by both", "only by A", "only by B", "kept by both"]
    assert sorted(texts) == sorted([*fates, "both, by chance ± 2 sd"])
    figure.draw_without_rendering()
    ends = [ax.title.get_window_extent().x1 for ax in figure.axes]
    assert max(ends) <= figure.bbox.x1
