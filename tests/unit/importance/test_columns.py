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
    checked_rows,
    pooled,
)
from heapr_lab.storage.hashing import digest

PIECE = 2**16
"""Rows that are compared at a time."""


def frame(**columns: Any) -> pd.DataFrame:
    """Three atoms of one expert."""
    return pd.DataFrame({"layer": 4, "expert": 5, "atom": [6, 7, 8], **columns})


# --- types and order --------------------------------------------------------------


def test_the_types_of_keys_and_tokens():
    """Small whole numbers; other columns stay, float32 as half as large as float64."""
    single = np.array([1, 2, 3], np.float32)
    given = frame(tokens=7, mine="text", sum_h2=single, max_abs_h=1.0)
    assert checked_rows(given).dtypes.astype(str).to_dict() == {
        "layer": "int16",
        "expert": "int16",
        "atom": "int32",
        "tokens": "int64",
        "mine": given["mine"].dtype.name,
        "sum_h2": "float32",
        "max_abs_h": "float64",
    }
    assert given["layer"].dtype == np.int64


def test_columns_of_earlier_tables_are_left_out():
    """No score reads them."""
    rows = checked_rows(frame(sum_h2=1.0, **dict.fromkeys(FORMER, 1.0)))
    assert [*rows] == ["layer", "expert", "atom", "sum_h2"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (frame().drop(columns=["layer", "atom"]), "frame has no column layer, atom"),
        (frame().iloc[:0], "the frame has no rows"),
        (frame(expert=0.5), "column expert has float64 values"),
        (frame(atom=[1.0, np.nan, 2.0]), "column atom has float64 values"),
        (frame(tokens=[1.0, 2.0, 3.0]), "column tokens has float64 values"),
        (frame(sum_h2=["a", "b", "c"]), r"column sum_h2 has \w+ values"),
        (frame(w_up_sq=np.ones(3, np.float16)), "column w_up_sq has float16 values"),
        (frame(max_abs_h=[1, 2, 3]), "column max_abs_h has int64 values"),
        (frame(atom=[1, 2, 2**31]), "column atom has numbers from 1 to 2147483648"),
        (frame(layer=2**15), "column layer has numbers from 32768 to 32768"),
        (frame(expert=[-1, 0, 1]), "column expert has numbers from -1 to 1"),
        (frame().iloc[::-1], r"atom\) \(4, 5, 7\) follows \(4, 5, 8\)"),
        (frame(layer=[1, 0, 0]), r"atom\) \(0, 5, 7\) follows \(1, 5, 6\)"),
        (frame(atom=[7, 7, 8]), r"atom\) \(4, 5, 7\) follows \(4, 5, 7\)"),
    ],
)
def test_other_rows(given, found):
    """What was found, and what was expected."""
    with pytest.raises(SpecError, match=found + ": expected rows sorted by layer, exp"):
        checked_rows(given)


def numbered(layer: Any, expert: Any, atom: Any) -> pd.DataFrame:
    """Rows of these keys."""
    return pd.DataFrame({"layer": layer, "expert": expert, "atom": atom})


def test_rows_as_pandas_sorts_them_are_in_order():
    """The keys are layer, expert and atom, up to the largest numbers; labels stay."""
    largest = [[0, 1, 2**15 - 1], [0, 1, 2**15 - 1], [0, 1, 2**31 - 1]]
    keys = np.stack(np.meshgrid(*largest), -1).reshape(-1, 3)
    given = numbered(*np.random.default_rng(0).permutation(keys).T)
    expected = given.sort_values(["layer", "expert", "atom"])
    rows = checked_rows(expected)
    pd.testing.assert_frame_equal(rows, expected, check_dtype=False)


@pytest.mark.parametrize("at", [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
def test_order_is_seen_in_long_tables(at):
    """Two rows may be exchanged anywhere, even where one piece ends."""
    atoms = np.arange(2 * PIECE + 2)
    assert len(checked_rows(numbered(0, 0, atoms))) == len(atoms)
    atoms[[at, at - 1]] = atoms[[at - 1, at]]
    with pytest.raises(SpecError, match=r"follows \(0, 0, "):
        checked_rows(numbered(0, 0, atoms))


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
