"""Rows and metadata of tables: types, order and values, and how two become one."""

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
    merge_frames,
    merge_metadata,
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
    """So that such a table can be merged with a new one."""
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
    merged = merge_frames(ours, frame(**{name: b}))
    assert merged[name].tolist() == expected
    assert merged.index.tolist() == [7, 8, 9]
    assert ours[name].tolist() == a


def test_sums_are_rounded_once():
    """The wider type is used: float64 beside float32; whole numbers stay whole."""
    rng = np.random.default_rng(0)
    x, y = (rng.lognormal(0, 9, 3).astype(np.float32) for _ in range(2))
    exact = (x.astype(np.float64) + y).astype(np.float32)
    assert (merge_frames(frame(sum_h2=x), frame(sum_h2=y))["sum_h2"] == exact).all()
    a, b = np.float32(1), 2.0**-30
    merged = merge_frames(frame(sum_h2=a), frame(sum_h2=b))
    assert merged["sum_h2"].tolist() == [1 + 2.0**-30] * 3
    narrow = frame(sum_h2=np.array([0.1, 0.2, 0.3], dtype=np.float32))
    assert merge_frames(narrow, narrow)["sum_h2"].dtype == np.float32
    large = frame(tokens=2**60 + 1)
    assert merge_frames(large, large)["tokens"].tolist() == [2**61 + 2] * 3
    assert merge_frames(large, large)["tokens"].dtype == np.int64


def test_norms_may_differ_by_rounding_alone():
    """The limit is a hundred-thousandth of their value, however small that is."""
    merge_frames(frame(w_up_sq=1e-9), frame(w_up_sq=1e-9 * (1 + 9e-6)))
    for other in (1e-9 * (1 + 2e-5), 0.0):
        with pytest.raises(SpecError, match="w_up_sq differs in 3 of 3 rows"):
            merge_frames(frame(w_up_sq=1e-9), frame(w_up_sq=other))


def test_rows_that_differ():
    """The first difference is named, in whichever key it is."""
    with pytest.raises(SpecError, match="different rows: 3 and 2 atoms"):
        merge_frames(frame(), frame().iloc[:2])
    for name in ("layer", "expert", "atom"):
        other = frame()
        other.loc[1:, name] = 9
        number = frame()[name].iloc[1]
        with pytest.raises(
            SpecError, match=f"row 1 has {name} {number} in one and 9 in the other"
        ):
            merge_frames(frame(), other)


def test_columns_that_only_one_has():
    """All of them are named, whichever table has them."""
    with pytest.raises(SpecError, match=r"only one of them has sum_g2, sum_h2$"):
        merge_frames(frame(sum_h2=1.0), frame(sum_g2=1.0))


def test_a_column_without_a_rule():
    """No rule is guessed."""
    with pytest.raises(SpecError, match=r"cannot merge column mine: .*sum_h2.*drop it"):
        merge_frames(frame(mine=1.0), frame(mine=1.0))


# --- metadata of two tables -------------------------------------------------------


def test_metadata_of_two_tables():
    """N adds, windows are listed one after the other, what is equal stays."""
    ours = {"N": 3, "windows": ["a"], "note": 1, "mine": 2, "spec_hash": "x"}
    theirs = {"N": 4, "windows": ["b", "c"], "note": 1, "mine": 3, "spec_hash": "x"}
    assert merge_metadata(ours, theirs) == {
        "N": 7,
        "windows": ["a", "b", "c"],
        "note": 1,
    }
    assert merge_metadata({"only": 1}, {}) == merge_metadata({}, {"only": 1}) == {}
    assert merge_metadata({"windows": ["a"]}, {}) == {"windows": ["a"]}
    assert merge_metadata({}, {"windows": ["a"]}) == {"windows": ["a"]}
    assert merge_metadata({"N": 1, "note": 0}, {"N": 2, "note": 1}) == {"N": 3}


def test_specifications_are_listed_whole():
    """They stand beside what they have in common, those of merged tables too."""
    a, b, c = ({"model": "m", "calibration": name} for name in "abc")
    pair = merge_metadata({"spec": a}, {"spec": b})
    assert pair["spec"] == {"model": "m", "merged": [a, b]}
    assert pair["spec_hash"] == digest(pair["spec"])
    for metadata, merged in (
        (merge_metadata(pair, {"spec": c}), [a, b, c]),
        (merge_metadata({"spec": c}, pair), [c, a, b]),
    ):
        assert metadata["spec"] == {"model": "m", "merged": merged}
        assert metadata["spec_hash"] == digest(metadata["spec"])


def test_what_one_table_alone_says_of_its_measurement():
    """It stays listed, and merges with any other; provenance has no hash."""
    provenance = {"device": "cpu"}
    expected = {"provenance": {"device": "cpu", "merged": [provenance]}}
    assert merge_metadata({"provenance": provenance}, {}) == expected
    assert merge_metadata({}, {"provenance": provenance}) == expected
    merged = merge_metadata({}, {"spec": {"model": "m"}})
    assert merged["spec"] == {"model": "m", "merged": [{"model": "m"}]}


def test_only_one_knows_its_tokens():
    """Then the tokens of both are unknown."""
    for pair in (({"N": 1}, {}), ({}, {"N": 1})):
        with pytest.raises(SpecError, match="only one of the tables has N"):
            merge_metadata(*pair)


def test_architectures_that_differ():
    """The sizes that differ are named; a missing architecture differs in all."""
    ours = {"architecture": {"a": 1, "b": 2, "c": 3}}
    with pytest.raises(SpecError, match=r"they differ in b, c, d$"):
        merge_metadata(ours, {"architecture": {"a": 1, "b": 3, "d": 4}})
    for pair in ((ours, {}), ({}, ours)):
        with pytest.raises(SpecError, match=r"they differ in a, b, c$"):
            merge_metadata(*pair)
    assert merge_metadata(ours, ours) == ours


def test_ways_of_measuring_that_differ():
    """Both values are told; one that is left out differs, too."""
    ours = {"spec": {"schema": 2}}
    for pair in ((ours, {"spec": {"dtype": 1}}), ({"spec": {"dtype": 1}}, ours)):
        with pytest.raises(SpecError, match=r"specifications differ in (dtype|schema)"):
            merge_metadata(*pair)
    with pytest.raises(SpecError, match="differ in dtype: f16 and f32; measure"):
        merge_metadata({"spec": {"dtype": "f16"}}, {"spec": {"dtype": "f32"}})


def test_what_would_count_twice():
    """A calibration set by its hash, else windows by their number."""
    hashes = [f"{i}" * 64 for i in range(3)]
    a, b = ({"spec": {"calibration": name}} for name in hashes[:2])
    with pytest.raises(SpecError, match=f"the calibration set {'1' * 12} would count"):
        merge_metadata(merge_metadata(a, b), b)
    ours, theirs = {"windows": ["a", "b", "c"]}, {"windows": ["d", "b", "a", "e"]}
    with pytest.raises(SpecError, match="cannot merge: 2 of 4 windows would count"):
        merge_metadata(ours, theirs)
    with pytest.raises(SpecError, match="cannot merge: 1 of 1 windows would count"):
        merge_metadata({**a, "windows": ["w"]}, {**b, "windows": ["w"]})
    same = {**a, "windows": ["a"]}
    with pytest.raises(SpecError, match="the calibration set 0"):
        merge_metadata(same, same)
