"""What masks remove: bars are shares of layers."""

import numpy as np
import pytest
from figure_rows import keep_of, scored_masks

from heapr_lab import figures


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
    assert data["layer"].tolist() == [2, 5]
    ax = figures.plot_mask_diff(data)
    tops = [bar.get_y() + bar.get_height() for bar in ax.patches]
    assert tops == pytest.approx([2 / 4, 0, 3 / 4, 0, 1, 2 / 6])
    # Of 4 atoms, 3 of A and 3 of B: both 9/4, variance 9/4 · 1 · 1 / (4 · 3)
    *_, chance = ax.containers
    line, _, (bars,) = chance.lines
    assert line.get_ydata().tolist() == pytest.approx([9 / 16, 0])
    (first, _) = bars.get_segments()
    assert np.ptp(first[:, 1]) == pytest.approx(4 * np.sqrt(9 / 48) / 4)
    assert ax.get_ylabel() == "removed [% of the layer]"


def test_the_figure_has_each_label_once():
    """One legend, below the panel."""
    figure = figures.figure_mask_diff(figures.mask_diff_data(*scored_masks()))
    (ax,), (legend,) = figure.axes, figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    fates = ["removed by both", "only by A", "only by B"]
    assert sorted(texts) == sorted([*fates, "both, by chance ± 2 sd"])
    assert legend.get_window_extent().y1 < ax.get_window_extent().y0
