"""In which order atoms go, and what each of them counts, written out."""

from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.ranking import GONE, atom_sizes, protected_atoms, rank_atoms
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
    parts = []
    for layer, own in scores.items():
        values = np.array(own, dtype=np.float64)
        expert, atom = np.indices(values.shape).reshape(2, -1)
        keys = {"layer": layer, "expert": expert, "atom": atom}
        counts = np.array(tokens[layer])[expert]
        parts.append(
            pd.DataFrame({**keys, "tokens": counts, "w_down_sq": values.ravel()})
        )
    frame = pd.concat(parts, ignore_index=True)
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
    """One, its parameters, or its operations for the tokens of its expert."""
    counted = {
        unit: {k: own.tolist() for k, own in atom_sizes(table_of(), unit=unit).items()}
        for unit in ("atoms", "parameters", "flops")
    }
    assert counted == {
        "atoms": {1: [1, 1], 4: [1, 1, 1]},
        "parameters": {1: [12, 12], 4: [11, 11, 11]},
        "flops": {1: [48, 96], 4: [20, 0, 100]},
    }
    for unit in counted:
        assert {own.dtype for own in atom_sizes(table_of(), unit=unit).values()} == {
            np.dtype(np.int64)
        }


def test_layers_without_tokens_are_all_named() -> None:
    """What pruning them saves of operations is not known."""
    idle = table_of(tokens={1: [0, 0], 4: [0, 0, 0]})
    with pytest.raises(SpecError, match="no token was routed in layers 1, 4, so"):
        atom_sizes(idle, unit="flops")
    assert atom_sizes(idle, unit="parameters")[4].tolist() == [11] * 3


def test_the_lowest_score_goes_first() -> None:
    """Over all layers, or layer by layer."""
    assert order(table_of()) == [
        *[(1, 0, 1), (1, 0, 2), (1, 0, 0), (1, 1, 2), (1, 1, 1), (1, 1, 0)],
        *[(4, 1, 1), (4, 1, 0), (4, 2, 0), (4, 2, 1), (4, 0, 1)],
    ]


def test_what_is_gone_goes_first_again() -> None:
    """Whatever its score, also where it would be protected otherwise."""
    gone = np.zeros(12, bool)
    gone[[5, 9]] = True
    table = table_of(**{GONE: gone})
    assert order(table)[:3] == [(1, 1, 2), (4, 1, 1), (1, 0, 1)]
    settings = {"exclude_layers": [4], "estimator": "magnitude"}
    keep = select(table, ratio=Fraction(2, 12), **settings)
    assert np.flatnonzero(~keep.rows).tolist() == [5, 9]


def test_prices_mix_shares_of_parameters_and_operations() -> None:
    """A score over (1 - μ) times one share and μ times the other, by hand."""
    # Of 6 · 12 + 6 · 11 = 138 parameters, and 3 · (48 + 96) + 2 · (20 + 100) = 672
    # operations.
    shares = {
        (layer, expert): (size / 138, flops / 672)
        for layer, size, own in ((1, 12, (48, 96)), (4, 11, (20, 0, 100)))
        for expert, flops in enumerate(own)
    }
    for price in (0, 0.25, 0.6, 0.75):
        cost = {
            (layer, expert, atom): score
            / (
                (1 - price) * shares[layer, expert][0]
                + price * shares[layer, expert][1]
            )
            for layer, own in SCORES.items()
            for expert, scores in enumerate(own)
            for atom, score in enumerate(scores)
        }
        expected = sorted(cost, key=cost.__getitem__)
        assert order(table_of(), price=price) == expected[:-1]


def test_whole_experts_go_by_their_sums() -> None:
    """6, 15 of layer 1 and 23, 15, 19 of layer 4; of equal sums the first."""
    assert order(table_of(), granularity="expert") == [
        *[(1, 0, atom) for atom in range(3)],
        *[(1, 1, atom) for atom in range(3)],
        *[(4, 1, atom) for atom in range(2)],
        *[(4, 2, atom) for atom in range(2)],
        *[(4, 0, atom) for atom in range(2)],
    ]


def test_a_narrow_expert_goes_by_its_sum_or_by_its_price() -> None:
    """Two atoms against three, of 3 + 1 + 2 in all."""
    wide, narrow = [(1, 0, atom) for atom in range(3)], [(4, 0, 0), (4, 0, 1)]
    table = table_of(SCORES | {4: [[3, 2], [8, 7], [9, 10]]})
    # The sum of 5 is the least, a mean of 2 would be.
    assert order(table, granularity="expert")[:5] == narrow + wide
    table = table_of(SCORES | {4: [[2, 1.8], [8, 7], [9, 10]]})
    # Per parameter 6 / (3 · 12) is less than 3.8 / (2 · 11), per atom it would not be.
    assert order(table, granularity="expert", price=0)[:5] == wide + narrow


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
    for own, kept in zip(values, keep.by_layer(1), strict=True):
        first = sorted(range(40), key=own.__getitem__)[:12]
        assert np.flatnonzero(~kept).tolist() == sorted(first)


def test_of_equal_peaks_the_last_rows_are_protected() -> None:
    """A share of all atoms stays, however many of them have the same peak."""
    peaks = np.random.default_rng(0).integers(1, 4, 120)
    table = table_of({1: np.ones((3, 40))}, {1: [1, 1, 1]}, max_abs_ph=peaks)
    selection = Selection(0.5, estimator="magnitude", protect_outliers=0.1)
    protected = protected_atoms(table, selection)
    last = sorted(range(120), key=peaks.__getitem__)[-12:]
    assert np.flatnonzero(protected).tolist() == sorted(last)


def test_negative_scores_of_steps() -> None:
    """Steps of two atoms of -1 and -1, and of -3 and -2: the lower mean goes first."""
    zeros = dict.fromkeys(("sum_hg2", "max_abs_ph"), 0.0)
    table = table_of(
        {4: [[0, 0], [0, 0]]}, {4: [1, 1]}, sum_hg=[8.0, 8.0, 24.0, 16.0], **zeros
    )
    keep = select(
        table, ratio=0.25, estimator="taylor", structure="aligned", multiple=2
    )
    assert keep.widths().loc[4].tolist() == [2, 0]


def test_positions_take_the_smallest_type_that_holds_them() -> None:
    """An atom that stays is after all others: at the largest number of the type."""
    for of, size, kind in (("atoms", 1, np.int32), ("model", 2**40, np.int64)):
        shape = LayerShape(n_experts=2, d_inter=3, d_expert=size)
        large = Architecture(30 * size, 2, size, {1: shape}, 0, 0)
        table = ImportanceTable.from_frame(
            table_of({1: SCORES[1]}, {1: [1, 1]}).frame,
            architecture=large.to_dict(),
        )
        ranking = rank_atoms(
            table, Selection(0.5, estimator="magnitude", min_atoms=1, of=of)
        )
        most = np.iinfo(kind).max
        assert ranking.positions.dtype == kind
        step = 1 if of == "atoms" else 3 * size
        # Scores 3, 1, 2 and 6, 5, 4, of which 3 and 6 stay.
        assert ranking.positions.tolist() == [most, 0, step, most, 3 * step, 2 * step]
        assert ranking.totals == (6 * step,)
        assert ranking.removable == (4 * step,)


def test_protected_experts_are_not_split() -> None:
    """Of whole experts and of widths, one protected atom keeps its unit."""
    peaks = np.zeros(12)
    peaks[1] = 9.0  # of the first expert
    table = table_of(max_abs_ph=peaks)
    settings: dict[str, Any] = {
        "protect_outliers": Fraction(1, 12),
        "estimator": "magnitude",
    }
    keep = select(table, ratio=0.25, granularity="expert", **settings)
    assert keep.widths().loc[1].tolist()[:2] == [3, 0]
    # Atom 1 scores lowest of all and stays; 2 and 0 go before the others.
    keep = select(
        table, ratio=Fraction(2, 12), structure="aligned", multiple=1, **settings
    )
    assert keep.by_layer(1).tolist() == [[False, True, False], [True] * 3]
