"""In which order atoms go, and what each of them counts, written out."""

from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.ranking import atom_sizes, rank_atoms
from heapr_lab.pruning.selection import select

# Layer 1: gated, 12 parameters and 24 operations an atom and token; layer 4: no gate,
# in 5 dimensions with a bias, 11 parameters and 20 operations.
MODEL = Architecture(
    n_parameters=500,
    bytes_per_parameter=2,
    d_model=4,
    layers={
        1: LayerShape(n_experts=2, d_inter=3, d_expert=4),
        4: LayerShape(n_experts=3, d_inter=2, d_expert=5, n_matrices=2, atom_biases=1),
    },
    other_weights_per_token=10,
    attention_width=0,
)
SCORES = {1: [[3, 1, 2], [6, 5, 4]], 4: [[12, 11], [8, 7], [9, 10]]}
TOKENS = {1: [2, 4], 4: [1, 0, 5]}


def table_of(
    scores: dict[int, Any] = SCORES, tokens: dict[int, Any] = TOKENS, **columns: Any
) -> ImportanceTable:
    """A table of `MODEL` whose magnitude scores are `scores`."""
    frames = []
    for layer, rows in scores.items():
        values = np.array(rows, dtype=np.float64)
        expert, atom = np.indices(values.shape).reshape(2, -1)
        keys = {"layer": layer, "expert": expert, "atom": atom}
        counts = np.array(tokens[layer])[expert]
        frames.append(
            pd.DataFrame({**keys, "tokens": counts, "w_down_sq": values.ravel()})
        )
    frame = pd.concat(frames, ignore_index=True)
    frame = frame.assign(w_up_sq=0.0, w_gate_sq=0.0, **columns)
    return ImportanceTable.from_frame(frame, architecture=MODEL.to_dict(), N=8)


def order(table: ImportanceTable, **settings: Any) -> list[tuple[int, int, int]]:
    """The atoms in the order in which they go, as the ratio grows by one at a time."""
    frame, gone = table.frame, []
    for number in range(1, table.n_atoms):
        ratio: Any = Fraction(number, table.n_atoms)
        keep = select(table, ratio=ratio, estimator="magnitude", **settings)
        rows = frame[["layer", "expert", "atom"]].to_numpy()[~keep.rows]
        gone += [atom for atom in map(tuple, rows.tolist()) if atom not in gone]
    return gone


def test_an_atom_counts_what_it_has() -> None:
    """An atom counts as one, or as its parameters."""
    counted = {
        unit: {k: row.tolist() for k, row in atom_sizes(table_of(), unit=unit).items()}
        for unit in ("atoms", "parameters")
    }
    assert counted == {
        "atoms": {1: [1, 1], 4: [1, 1, 1]},
        "parameters": {1: [12, 12], 4: [11, 11, 11]},
    }
    for unit in counted:
        assert {row.dtype for row in atom_sizes(table_of(), unit=unit).values()} == {
            np.dtype(np.int64)
        }


def test_the_lowest_score_goes_first() -> None:
    """It goes first over all layers, or layer by layer."""
    assert order(table_of()) == [
        *[(1, 0, 1), (1, 0, 2), (1, 0, 0), (1, 1, 2), (1, 1, 1), (1, 1, 0)],
        *[(4, 1, 1), (4, 1, 0), (4, 2, 0), (4, 2, 1), (4, 0, 1)],
    ]


def test_whole_experts_go_by_their_sums() -> None:
    """Sums: 6, 15 of layer 1; 23, 15, 19 of layer 4; of equal ones the first goes."""
    assert order(table_of(), granularity="expert") == [
        *[(1, 0, atom) for atom in range(3)],
        *[(1, 1, atom) for atom in range(3)],
        *[(4, 1, atom) for atom in range(2)],
        *[(4, 2, atom) for atom in range(2)],
        *[(4, 0, atom) for atom in range(2)],
    ]


def test_a_narrow_expert_goes_by_its_sum() -> None:
    """Two atoms against three, of 3 + 1 + 2 in all."""
    wide, narrow = [(1, 0, atom) for atom in range(3)], [(4, 0, 0), (4, 0, 1)]
    table = table_of(SCORES | {4: [[3, 2], [8, 7], [9, 10]]})
    # The sum of 5 is the least, a mean of 2 would be.
    assert order(table, granularity="expert")[:5] == narrow + wide


def test_whole_experts_count_all_their_atoms() -> None:
    """Of 500 parameters, the two first experts have 3 · 12 each."""
    for parameters, removed in ((36, 3), (37, 6), (72, 6)):
        ratio: Any = Fraction(parameters, 500)
        settings = {"estimator": "magnitude", "granularity": "expert"}
        assert (
            select(table_of(), ratio=ratio, of="model", **settings).n_removed == removed
        )


def test_of_equal_scores_the_first_rows_go() -> None:
    """As a stable sort has it, of so many that another sort would mix them."""
    values = np.random.default_rng(0).integers(1, 4, (3, 40))
    table = table_of({1: values}, {1: [1, 1, 1]})
    ranked = sorted(range(120), key=values.ravel().__getitem__)
    selection = Selection(0.5, estimator="magnitude")
    positions = rank_atoms(table, selection).positions
    assert np.argsort(positions).tolist() == ranked
    # Within an expert too: steps of one atom go in the order of its atoms.
    keep = select(
        table, ratio=0.3, estimator="magnitude", structure="per_layer", multiple=4
    )
    for row, kept in zip(values, keep.by_layer(1), strict=True):
        first = sorted(range(40), key=row.__getitem__)[:12]
        assert np.flatnonzero(~kept).tolist() == sorted(first)


def test_steps_go_by_their_mean() -> None:
    """Steps of two atoms of 3 and 2, and of 4 and 0: the lower mean goes first."""
    table = table_of(
        {4: [[0, 0], [0, 0]]}, {4: [1, 1]}, sum_hg2=[3.0, 2.0, 4.0, 0.0], max_abs_ph=0.0
    )
    keep = select(
        table, ratio=0.25, estimator="fisher", structure="aligned", multiple=2
    )
    assert keep.widths().loc[4].tolist() == [2, 0]
