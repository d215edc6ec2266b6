"""Figure 1 and the widths: bars and cells are the numbers that go in."""

import pandas as pd
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


def test_width_heat_map_holds_the_widths() -> None:
    """Cells are the widths, dots the used experts, crosses the unrouted ones."""
    widths = pd.DataFrame([[4, 0, 2], [1, 3, 4]], index=[1, 3])
    tokens = pd.DataFrame([[10, 0, 30], [5, 5, 10]], index=[1, 3])
    ax = figures.plot_widths(widths, tokens)
    mesh, dots, crosses = ax.collections
    assert mesh.get_array().tolist() == widths.to_numpy().tolist()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "3"]
    # areas are shares of the layer: 10/40 and 30/40, then 5/20, 5/20 and 10/20
    areas = dots.get_sizes() / dots.get_sizes().max()
    assert areas == pytest.approx([1 / 3, 1, 1 / 3, 1 / 3, 2 / 3])
    assert crosses.get_offsets().tolist() == [[1, 0]]
    assert ax.figure.axes[1].get_ylabel() == "atomic experts kept [count]"
