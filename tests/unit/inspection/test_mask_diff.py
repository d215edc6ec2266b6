"""Two masks compared: counts, chance and scores, against Python sets."""

import math
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
from random_tables import random_table
from scipy.stats import hypergeom

from heapr_lab import ImportanceTable, KeepMask, Selection
from heapr_lab.errors import SpecError
from heapr_lab.figures import mask_diff_data
from heapr_lab.inspection.mask_diff import (
    ScoredMask,
    overlap,
    rank_agreement,
    spearman,
)

SHAPES = {1: (3, 5), 4: (2, 7)}
"""Layers that differ, and whose numbers are not their positions."""
Atom = tuple[int, int, int]


def scored(label: str, seed: int, share: float = 0.4, **options: Any) -> ScoredMask:
    """Random scores, of which the lowest are removed."""
    rng = np.random.default_rng(seed)
    scores = rng.choice(40, 29) + rng.integers(0, 2, 29) / 2  # with ties
    kept = np.ones(29, bool)
    kept[np.argsort(scores, kind="stable")[: int(share * 29)]] = False
    like = KeepMask({k: np.ones(shape, bool) for k, shape in SHAPES.items()})
    return ScoredMask(label, KeepMask.from_rows(like, kept), scores, **options)


def atoms() -> list[Atom]:
    """All atoms, in the order of the rows."""
    return [(layer, *at) for layer, shape in SHAPES.items() for at in np.ndindex(shape)]


def removed(keep: KeepMask) -> set[Atom]:
    """The removed atoms, one by one."""
    return {(k, e, i) for k, e, i in atoms() if not keep.by_layer(k)[e, i]}


def test_overlap_is_that_of_sets():
    """Every count; by chance, as many as in draws without replacement."""
    a, b = scored("A", 1), scored("B", 2, share=0.7)
    frame = overlap(a.keep, b.keep)
    assert frame["layer"].tolist() == [*SHAPES]
    for row in frame.to_dict("records"):
        mine, other, every = (
            {atom for atom in group if atom[0] == row["layer"]}
            for group in (removed(a.keep), removed(b.keep), set(atoms()))
        )
        counts = [len(every), len(mine), len(other), len(mine & other)]
        names = ["n_atoms", "removed_a", "removed_b", "both"]
        assert [row[name] for name in names] == counts
        drawn = hypergeom(*counts[:3])
        assert row["expected"] == pytest.approx(drawn.mean())
        assert row["sd"] == pytest.approx(drawn.std())
        z = (len(mine & other) - drawn.mean()) / drawn.std()
        assert row["z"] == pytest.approx(z)


def test_what_is_divided_by_nothing_is_missing():
    """A layer of which one removes nothing, and one that both remove whole."""
    none, whole = np.ones((2, 3), bool), np.zeros((2, 3), bool)
    some = np.array([[True, False, True], [True, True, True]])
    a = KeepMask({0: none, 1: whole, 2: none})
    b = KeepMask({0: some, 1: whole, 2: none})
    frame = overlap(a, b)
    assert frame["z"].isna().all()  # chance cannot vary


def test_counts_of_large_layers_do_not_overflow():
    """2²⁰ atoms of a layer: four such factors are beyond 64 bits."""
    half = np.ones((64, 16384), bool)
    half[:, ::2] = False
    row = overlap(KeepMask({0: half}), KeepMask({0: ~half})).iloc[0]
    assert (row["both"], row["expected"]) == (0, 2**18)
    variance = Fraction((2**19) ** 4, 2**40 * (2**20 - 1))
    assert row["sd"] == pytest.approx(math.sqrt(variance))


# --- scores -----------------------------------------------------------------------


def test_agreement_is_the_correlation_of_average_ranks():
    """Spearman's correlation by its definition, by layer, with ties."""
    a, b = scored("A", 1), scored("B", 2)
    frame = rank_agreement(a, b)
    layers = np.array([layer for layer, _, _ in atoms()])
    scores = pd.DataFrame({"a": a.scores, "b": b.scores})
    expected = {
        layer: scores[layers == layer].rank().corr().loc["a", "b"] for layer in SHAPES
    }
    assert dict(zip(frame["layer"], frame["n_atoms"], strict=True)) == {1: 15, 4: 14}
    assert frame["spearman"].tolist() == pytest.approx([*expected.values()])


def test_constant_scores_have_no_agreement():
    """It is missing, silently, as that of one score."""
    a, b = scored("A", 1), scored("B", 2)
    b.scores[:15] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rho = rank_agreement(a, b)["spearman"]
        assert math.isnan(spearman(np.ones(1), np.ones(1)))
    assert rho.isna().tolist() == [True, False]


def test_a_selection_brings_its_scores():
    """The estimator's options count, and the scope in which atoms are removed.

    The model is the one that its table was measured on, if that says so.
    """
    table = random_table(2, 2, 4)
    choice = Selection(0.5, "random", scope="layer", estimator_options=(("seed", 3),))
    mask = ScoredMask.select("A", table, choice)
    assert mask.scores.tolist() == table.score("random", seed=3).tolist()
    assert mask.keep.layer_ratios().tolist() == [0.5, 0.5]
    assert mask.model is None
    spec = {"model": {"weights": "1"}}
    known = ImportanceTable.from_frame(table.frame, spec=spec)
    assert ScoredMask.select("A", known, Selection(0.5)).model == spec["model"]


# --- refusals ---------------------------------------------------------------------


def test_masks_of_different_models_are_refused():
    """Their shapes tell, and, where both are known, what was measured."""
    a = scored("A", 1, model={"weights": "1", "class": "x"})
    other = KeepMask({1: np.ones((3, 5), bool), 4: np.ones((2, 6), bool)})
    with pytest.raises(SpecError, match=r"4: \(2, 6\)\}, expected .*4: \(2, 7\)"):
        overlap(a.keep, other)
    b = scored("B", 2, model={"weights": "2", "class": "x"})
    for compare in (rank_agreement, mask_diff_data):
        with pytest.raises(SpecError, match=r"different models.*differ in weights;"):
            compare(a, b)
    assert len(rank_agreement(a, scored("B", 2))) == 2  # of an unknown model


def test_too_few_scores_are_named():
    """With their number, and that of the atoms."""
    a = scored("A", 1)
    short = ScoredMask("B", a.keep, a.scores[:-1])
    with pytest.raises(SpecError, match=r"of B have the shape \(28,\), expected \(29,"):
        rank_agreement(a, short)
