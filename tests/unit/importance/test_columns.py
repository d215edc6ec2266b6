"""Rows and metadata of tables: types, order and values, and what two measured."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import (
    FORMER,
    MAXIMA,
    NORMS,
    SUMS,
    check_spec,
    check_values,
    pooled,
    sorted_rows,
    typed_rows,
)
from heapr_lab.storage.hashing import digest

PIECE = 2**16
"""Rows that are compared at a time."""


def frame(**columns: Any) -> pd.DataFrame:
    """Three atoms of one expert."""
    return pd.DataFrame({"layer": 4, "expert": 5, "atom": [6, 7, 8], **columns})


# --- types ------------------------------------------------------------------------


def test_the_types_of_keys_and_tokens():
    """Small whole numbers, whatever they were before; other columns stay."""
    typed = typed_rows(frame(tokens=[1.0, 2.0, 3.0], mine="text", sum_h2=[1, 2, 3]))
    assert typed.dtypes.astype(str).to_dict() == {
        "layer": "int16",
        "expert": "int16",
        "atom": "int32",
        "tokens": "int64",
        "mine": frame(mine="text")["mine"].dtype.name,
        "sum_h2": "float64",
    }
    assert typed["tokens"].tolist() == [1, 2, 3]


def test_columns_of_earlier_tables_are_left_out():
    """No score reads them."""
    typed = typed_rows(frame(sum_h2=[1, 2, 3], **dict.fromkeys(FORMER, 1.0)))
    assert [*typed] == ["layer", "expert", "atom", "sum_h2"]


@pytest.mark.parametrize("name", [*SUMS[1:], *MAXIMA, *NORMS])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int8])
def test_what_is_measured_is_at_least_float32(name, kind):
    """float32 stays, for files are half as large; all else becomes float64."""
    typed = typed_rows(frame(**{name: np.array([1, 2, 3], dtype=kind)}))
    assert typed[name].dtype == (np.float32 if kind == np.float32 else np.float64)
    assert typed[name].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            frame().drop(columns=["layer", "atom"]),
            "3 rows and lacks column layer, atom",
        ),
        (frame().iloc[:0], r"has 0 rows and lacks column \(none\); expected rows"),
        (
            frame(expert=0.5),
            "column expert must hold whole numbers that fit int16, got",
        ),
        (frame(atom=[1.0, np.nan, 2.0]), "atom must hold whole numbers that fit int32"),
        (frame(atom=[1, 2, 2**31]), "int64 values up to 2147483648"),
        (frame(tokens=["a", "b", "c"]), "column tokens must hold numbers, got"),
        (frame(sum_h2=["a", "b", "c"]), "column sum_h2 must hold numbers, got"),
        (frame(sum_h2=[{}, {}, {}]), "column sum_h2 must hold numbers, got object"),
    ],
)
def test_rows_of_other_types(given, message):
    """Column, type and value are named."""
    with pytest.raises(SpecError, match=message):
        typed_rows(given)


# --- values -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SUMS, *MAXIMA, *NORMS])
def test_values_at_the_edge_are_taken(name):
    """Nought, and the largest number there is; of signed sums the least one, too."""
    largest = np.finfo(np.float64).max
    least = -largest if name == "sum_hg" else 0.0
    check_values(frame(**{name: [least, 0.0, largest]}))
    check_values(frame())


@pytest.mark.parametrize("bad", [-1e-30, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["tokens", "sum_h2", "max_abs_h", "elimination"])
def test_the_atom_of_an_impossible_value_is_named(name, bad):
    """The first one, and what was expected there."""
    message = rf"column {name} has {bad} at \(layer, expert, atom\) \(4, 5, 7\), "
    with pytest.raises(SpecError, match=message + "expected a finite number from 0;"):
        check_values(frame(**{name: [0.0, bad, bad]}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_signed_sum_is_finite(bad):
    """That is all that is expected of it."""
    with pytest.raises(SpecError, match=r"\(4, 5, 8\), expected a finite number;"):
        check_values(frame(sum_hg=[-1.0, 1.0, bad]))


def test_a_bad_column_after_one_that_is_missing():
    """Each column is looked at, whichever others are there."""
    with pytest.raises(SpecError, match="column w_gate_sq has -1"):
        check_values(frame(sum_h2=1.0, w_gate_sq=-1.0))


# --- specification ----------------------------------------------------------------


def test_a_hash_belongs_to_its_specification():
    """Without a hash there is nothing to compare."""
    check_spec({"spec": {"a": 1}, "spec_hash": digest({"a": 1})})
    check_spec({"spec": {"a": 1}})
    check_spec({})
    wrong = {"spec": {"a": 2}, "spec_hash": digest({"a": 1})}
    told = f"is {digest({'a': 1})[:12]}, its spec hashes to {digest({'a': 2})[:12]}: "
    with pytest.raises(SpecError, match=told):
        check_spec(wrong)


# --- order ------------------------------------------------------------------------


def numbered(layer: Any, expert: Any, atom: Any) -> pd.DataFrame:
    """Rows of these keys."""
    return pd.DataFrame({"layer": layer, "expert": expert, "atom": atom})


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_sorted_as_pandas_sorts_them(seed):
    """The keys are layer, expert and atom, up to the largest numbers; labels stay."""
    rng = np.random.default_rng(seed)
    largest = [[0, 1, 2**15 - 1], [0, 1, 2**15 - 1], [0, 1, 2**31 - 1]]
    keys = np.stack(np.meshgrid(*largest), -1).reshape(-1, 3)
    given = numbered(*rng.permutation(keys).T)
    expected = given.sort_values(["layer", "expert", "atom"])
    pd.testing.assert_frame_equal(sorted_rows(given), expected)
    assert sorted_rows(expected) is expected


@pytest.mark.parametrize("name", ["layer", "expert", "atom"])
def test_numbers_count_from_nought(name):
    """Each key column does."""
    with pytest.raises(SpecError, match="must count from 0"):
        sorted_rows(frame(**{name: [-1, 0, 1]}))
    sorted_rows(frame(**{name: [0, 0, 0], "atom": [0, 1, 2]}))


def test_rows_that_are_there_twice_are_counted():
    """The first of them is named."""
    given = numbered([3, 1, 2, 1, 3], 5, [0, 7, 0, 7, 0])
    with pytest.raises(SpecError, match=r"2 rows are repeated, first .* \(1, 5, 7\)"):
        sorted_rows(given)


@pytest.mark.parametrize("at", [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
def test_order_is_seen_in_long_tables(at):
    """Two rows may be exchanged anywhere, even where one piece ends."""
    atoms = np.arange(2 * PIECE + 2)
    atoms[[at, at - 1]] = atoms[[at - 1, at]]
    assert sorted_rows(numbered(0, 0, atoms))["atom"].is_monotonic_increasing
    atoms.sort()
    atoms[at] = atoms[at - 1]
    with pytest.raises(SpecError, match="1 rows are repeated"):
        sorted_rows(numbered(0, 0, atoms))


# --- rows of two tables -----------------------------------------------------------


@pytest.mark.parametrize("name", [*SUMS, *MAXIMA, *NORMS])
def test_each_column_has_its_rule(name):
    """Sums add, of maxima the larger stays, norms are those of one model."""
    a, b = [1.0, 2.0, 4.0], [3.0, 2.0, 1.0]
    expected = [4.0, 4.0, 5.0] if name in SUMS else [3.0, 2.0, 4.0]
    if name in NORMS:
        b = expected = a
    ours = frame(**{name: a}).set_index(pd.Index([7, 8, 9]))
    whole = pooled(ours, frame(**{name: b}))
    assert whole[name].tolist() == expected
    assert whole.index.tolist() == [7, 8, 9]
    assert ours[name].tolist() == a


def test_what_only_one_table_measured_is_left_out():
    """Whichever it is; nothing is summed by halves."""
    ours, theirs = frame(sum_h2=1.0, sum_g2=1.0), frame(sum_h2=2.0, sum_hg=1.0)
    whole = pooled(ours, theirs.assign(elimination=1.0))
    assert [*whole] == ["layer", "expert", "atom", "sum_h2"]
