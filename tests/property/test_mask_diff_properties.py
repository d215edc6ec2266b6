"""Invariants of two masks compared."""

import itertools
import statistics

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapr_lab.inspection.mask_diff import (
    ScoredMask,
    overlap,
    overlap_in_all,
    rank_agreement,
    removed_by_one,
)
from heapr_lab.pruning.masks import KeepMask

pytestmark = pytest.mark.property

SWAPPED = {"removed_a": "removed_b", "share_of_a": "share_of_b"}
SWAPPED |= {"score_a": "score_b", "rank_a": "rank_b"}
SWAPPED |= {new: old for old, new in SWAPPED.items()}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[ScoredMask, ScoredMask]:
    """Two random masks of a model, with scores that have ties."""
    sizes = st.tuples(st.integers(1, 3), st.integers(1, 5))
    shapes = draw(st.dictionaries(st.integers(0, 9), sizes, min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    within, made = draw(st.booleans()), []
    for label in ("A", "B"):
        share = rng.random()
        arrays = {k: rng.random(shape) > share for k, shape in shapes.items()}
        keep = KeepMask(arrays)
        scores = rng.integers(0, 6, keep.n_atoms).astype(float)
        made.append(ScoredMask(label, keep, scores, within_layer=within))
    return made[0], made[1]


@given(pairs(), st.sampled_from(["layer", "expert"]))
def test_sides_can_be_swapped(pair: tuple[ScoredMask, ScoredMask], by: str) -> None:
    """The same numbers with A and B exchanged."""
    a, b = pair
    found, other = overlap(a.keep, b.keep, by=by), overlap(b.keep, a.keep, by=by)
    same = other.rename(columns=SWAPPED)[list(found)]
    pd.testing.assert_frame_equal(found, same, rtol=1e-12)
    pd.testing.assert_frame_equal(rank_agreement(a, b), rank_agreement(b, a))
    ones, others = removed_by_one(a, b), removed_by_one(b, a)
    others["removed_by"] = others["removed_by"].map({"a": "b", "b": "a"})
    same = others.rename(columns=SWAPPED)[list(ones)]
    pd.testing.assert_frame_equal(ones, same)


@given(pairs())
def test_a_mask_removes_what_it_removes(pair: tuple[ScoredMask, ScoredMask]) -> None:
    """Against itself everything that is removed is shared, and no atom is left over."""
    own, _ = pair
    found = overlap(own.keep, own.keep)
    some = found["removed_a"].gt(0)
    for name in ("jaccard", "share_of_a", "share_of_b"):
        assert found.loc[some, name].eq(1).all()
        assert found.loc[~some, name].isna().all()
    assert (found["z"].dropna() > 0).all()
    assert removed_by_one(own, own).empty
    assert rank_agreement(own, own)["spearman"].dropna().round(12).eq(1).all()


@given(pairs())
def test_experts_add_up_to_layers_and_layers_to_the_model(
    pair: tuple[ScoredMask, ScoredMask],
) -> None:
    """Counts of experts, layers and all; both lies between its bounds."""
    a, b = (own.keep for own in pair)
    names = ["n_atoms", "removed_a", "removed_b", "both"]
    layers = overlap(a, b)
    experts = overlap(a, b, by="expert").groupby("layer")[names].sum()
    assert experts.to_numpy().tolist() == layers[names].to_numpy().tolist()
    whole = overlap_in_all(layers).iloc[0]
    assert whole["n_atoms"] == a.n_atoms
    assert whole["both"] == np.count_nonzero(~a.rows & ~b.rows)
    assert (layers["both"] <= layers[["removed_a", "removed_b"]].min(axis=1)).all()
    least = layers["removed_a"] + layers["removed_b"] - layers["n_atoms"]
    assert (layers["both"] >= least).all()


@given(st.integers(1, 7), st.data())
def test_chance_is_the_mean_of_all_masks(n: int, data: st.DataObject) -> None:
    """Mean and standard deviation over every mask that removes as many as B."""
    n_a, n_b = (data.draw(st.integers(0, n)) for _ in "ab")
    every, gone = np.arange(n), set(range(n_a))
    masks = [set(chosen) for chosen in itertools.combinations(range(n), n_b)]
    both = [len(gone & mask) for mask in masks]
    a = KeepMask({0: (every >= n_a)[None]})
    b = KeepMask({0: (every >= n_b)[None]})
    found = overlap(a, b).iloc[0]
    assert found["expected"] == pytest.approx(statistics.mean(both))
    assert found["sd"] == pytest.approx(statistics.pstdev(both))
