"""Figure 1: bars are the numbers that go in."""

import pytest
from figure_rows import keep_of

from heapr_lab import figures


def test_layer_bars_are_the_removed_shares() -> None:
    """Bars are the layers' shares in per cent, the line is the global ratio."""
    data = figures.layer_ratios_data({0.25: keep_of(4, 1), 0.5: keep_of(7, 3)})
    by_hand = data.groupby("ratio")["layer_ratio"].mean().to_dict()
    assert by_hand == pytest.approx({0.25: 0.25, 0.5: 0.5})
    ax = figures.plot_layer_ratios(data[data["ratio"].eq(0.25)])
    assert [bar.get_height() for bar in ax.patches] == [0.4, 0.1]
    assert [bar.get_center()[0] for bar in ax.patches] == pytest.approx([1, 2])
    assert set(ax.get_lines()[0].get_ydata()) == {0.25}
    assert ax.get_ylabel() == "removed [% of the layer]"
    assert ax.yaxis.get_major_formatter()(0.4, 0) == "40"
    assert len(figures.figure_layer_ratios(data).axes) == 2
