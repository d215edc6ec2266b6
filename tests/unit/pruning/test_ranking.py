"""In which order atoms go, and what each of them counts, written out."""

from fractions import Fraction
from typing import Any

import numpy as np
from score_tables import TWO_KINDS, make_table

from heapr_lab import ImportanceTable, Selection, select
from heapr_lab.pruning.ranking import rank_atoms

SCORES = [[3, 1, 2], [6, 5, 4]]


def order(table: ImportanceTable, **settings: Any) -> list[tuple[int, int, int]]:
    """The atoms in the order in which they go, as the ratio grows by one at a time."""
    frame, gone = table.frame, []
    for number in range(1, table.n_atoms):
        ratio: Any = Fraction(number, table.n_atoms)
        keep = select(table, ratio=ratio, **settings)
        rows = frame[["layer", "expert", "atom"]].to_numpy()[~keep.rows]
        gone += [atom for atom in map(tuple, rows.tolist()) if atom not in gone]
    return gone


def test_whole_experts_go_by_their_sums():
    """Sums: 6, 15 of layer 1; 5, 15, 19 of layer 4; of equal ones the first goes.

    Two atoms of a sum of 5 go before three of 6, although their mean is higher.
    """
    table = make_table({1: SCORES, 4: [[3, 2], [8, 7], [9, 10]]})
    assert order(table, granularity="expert") == [
        *[(4, 0, atom) for atom in range(2)],
        *[(1, 0, atom) for atom in range(3)],
        *[(1, 1, atom) for atom in range(3)],
        *[(4, 1, atom) for atom in range(2)],
        *[(4, 2, atom) for atom in range(2)],
    ]


def test_whole_experts_count_all_their_atoms():
    """Of 1000 parameters, the two first experts have 3 · 12 each."""
    scores = {1: SCORES, 3: [[12, 11], [8, 7]]}
    table = make_table(scores, architecture=TWO_KINDS.to_dict())
    for parameters, removed in ((36, 3), (37, 6), (72, 6)):
        ratio: Any = Fraction(parameters, 1000)
        keep = select(table, ratio=ratio, of="model", granularity="expert")
        assert keep.n_removed == removed


def test_of_equal_scores_the_first_rows_go():
    """As a stable sort has it, of so many that another sort would mix them."""
    values = np.random.default_rng(0).integers(1, 4, (3, 40))
    table = make_table({1: values})
    ranked = sorted(range(120), key=values.ravel().__getitem__)
    positions = rank_atoms(table, Selection(0.5)).positions
    assert np.argsort(positions).tolist() == ranked
    # Within an expert too: steps of one atom go in the order of its atoms.
    keep = select(table, ratio=0.3, structure="per_layer", multiple=4)
    for row, kept in zip(values, keep.by_layer(1), strict=True):
        first = sorted(range(40), key=row.__getitem__)[:12]
        assert np.flatnonzero(~kept).tolist() == sorted(first)


def test_steps_go_by_their_mean():
    """Steps of two atoms of 3 and 2, and of 4 and 0: the lower mean goes first."""
    table = make_table({4: [[3, 2], [4, 0]]})
    keep = select(table, ratio=0.25, structure="aligned", multiple=2)
    assert keep.widths().loc[4].tolist() == [2, 0]
