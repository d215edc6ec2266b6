"""The numbers of the map are those that a loop over the table finds."""

import numpy as np
import pandas as pd
import pytest
from random_tables import random_table

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.expert_map import (
    color_limits,
    descending,
    expert_load,
    kept_share,
    rows_of,
    summed,
)
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select

WIDE, NARROW = (3, 5), (2, 4)
"""Experts and atoms of the layers 1 and 4."""


@pytest.fixture
def table() -> ImportanceTable:
    """Layers of different shapes, whose indices are not their rows."""
    rng = np.random.default_rng(0)
    parts = [
        pd.MultiIndex.from_product([[layer], range(n), range(size)]).to_frame(False)
        for layer, (n, size) in ((1, WIDE), (4, NARROW))
    ]
    frame = pd.concat(parts, ignore_index=True)
    frame.columns = ["layer", "expert", "atom"]
    frame["tokens"] = [7] * 5 + [0] * 5 + [2] * 5 + [6] * 4 + [2] * 4
    frame["sum_h2"], frame["sum_g2"] = 1.0, rng.random(len(frame))
    return ImportanceTable.from_frame(frame)


def by_hand(table: ImportanceTable, values: np.ndarray, how: str) -> np.ndarray:
    """An aggregate of the rows of each expert, by a loop."""
    frame, grid = table.frame, np.full((2, 3), np.nan)
    for row, layer in enumerate((1, 4)):
        for expert in range(3):
            rows = values[frame["layer"].eq(layer) & frame["expert"].eq(expert)]
            if len(rows):
                grid[row, expert] = getattr(rows, how)()
    return grid


def test_values(table: ImportanceTable) -> None:
    """Layers with fewer experts have no values in the last columns."""
    keep = select(table, Selection(ratio=0.4))
    scores = table.scores("heapr")
    np.testing.assert_allclose(summed(table, scores), by_hand(table, scores, "sum"))
    np.testing.assert_allclose(
        kept_share(table, keep), by_hand(table, keep.rows, "mean")
    )
    expected = [[7 / 3, 0, 2 / 3], [1.5, 0.5, np.nan]]
    np.testing.assert_allclose(expert_load(table), expected)


def test_rows_of(table: ImportanceTable) -> None:
    """The rows of exactly one expert."""
    for layer, (n_experts, size) in ((1, WIDE), (4, NARROW)):
        for expert in range(n_experts):
            rows = table.frame.iloc[rows_of(table, layer, expert)]
            assert rows["layer"].eq(layer).all()
            assert rows["expert"].eq(expert).all()
            assert rows["atom"].tolist() == list(range(size))


def test_load_of_a_layer_that_no_token_reached() -> None:
    """An even share of nothing has no number; no warning either."""
    frame = random_table(2, 2, 3).frame.assign(tokens=[0] * 6 + [1] * 6)
    load = expert_load(ImportanceTable.from_frame(frame))
    np.testing.assert_array_equal(load, [[np.nan, np.nan], [1, 1]])


def test_order() -> None:
    """Largest first, ties as they are numbered, experts that are not there last."""
    order = descending(np.array([[1.0, 3, np.nan, 3], [-2, -1, 0, np.nan]]))
    assert order.tolist() == [[1, 3, 0, 2], [2, 1, 0, 3]]


@pytest.mark.parametrize(
    ("values", "diverging", "expected"),
    [
        ([[0.1, 0.4, np.nan]], False, (0, 0.4)),
        ([[0.1, 0.4, np.nan]], True, (-0.4, 0.4)),
        ([[-0.5, 0.4, np.nan]], False, (-0.5, 0.5)),
        ([[0.0, 0.0, np.nan]], False, (0, 1)),
        ([[0.0, 0.0, np.nan]], True, (-1, 1)),
        ([[1.0] * 200 + [50]], False, (0, 2)),
        ([[0.0] * 200 + [50]], False, (0, 50)),
    ],
)
def test_color_limits(
    values: list[list[float]], diverging: bool, expected: tuple[float, float]
) -> None:
    """0 is an end, or the middle; one expert far beyond does not take all colours."""
    limits = color_limits(np.array(values), diverging=diverging)
    assert limits == pytest.approx(expected)
