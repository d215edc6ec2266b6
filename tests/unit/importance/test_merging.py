"""How rows and metadata of two tables become one, without a model."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import (
    MAXIMA,
    NORMS,
    SUMS,
    merge_frames,
    merge_metadata,
)
from heapr_lab.storage.hashing import digest


def frame(**columns: Any) -> pd.DataFrame:
    """Three atoms of one expert."""
    return pd.DataFrame({"layer": 0, "expert": 0, "atom": [0, 1, 2], **columns})


# --- rows -------------------------------------------------------------------------


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


# --- metadata ---------------------------------------------------------------------


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
