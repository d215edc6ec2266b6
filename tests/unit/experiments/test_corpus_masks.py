"""Atoms that one mask removes are put back: which, and what is measured."""

import math
from pathlib import Path

import numpy as np
import pytest
from tiny_folder import write_text

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.experiments.corpus_masks import (
    DRAWN,
    MIXTURE,
    RANKED,
    corpus_masks,
    drawn_like,
    kept_of_alone,
    mask_losses,
    removed_alone,
    restored_losses,
    with_rows,
)
from heapr_lab.inspection.mask_diff import ScoredMask
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import masking
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench

SHARES = (0.1, 0.5, 1.0)


@pytest.fixture(scope="module")
def pair(root: Path) -> tuple[str, str]:
    """Two texts of different words."""
    names = root / "one.txt", root / "other.txt"
    write_text(names[0], n_texts=60)
    words = " ".join(f"{number} of the others" for number in range(2000))
    names[1].write_text(words, encoding="utf-8")
    return str(names[0]), str(names[1])


@pytest.fixture(scope="module")
def masks(bench: Workbench, pair: tuple[str, str]) -> dict[str, ScoredMask]:
    """The masks of three calibrations; each removes half of the tiny model."""
    return corpus_masks(bench, pair, ratio=0.5)


def by_hand(bench: Workbench, keep: KeepMask, corpus: str) -> float:
    """Δloss without the workbench's cache."""
    ids = bench.test_windows(corpus).ids
    dense = evaluate_perplexity(bench.model, ids).nll
    with masking(bench.model, keep):
        return evaluate_perplexity(bench.model, ids).nll - dense


def scored(kept: str, scores: list[float]) -> ScoredMask:
    """A mask of two layers: one expert of four atoms, two of one."""
    rows = [letter == "1" for letter in kept]
    arrays = {1: np.array([rows[:4]]), 3: np.array([[row] for row in rows[4:]])}
    return ScoredMask("", KeepMask.from_arrays(arrays), np.array(scores))


def test_the_masks_are_those_of_their_texts(
    bench: Workbench, pair: tuple[str, str], masks: dict[str, ScoredMask]
) -> None:
    """All remove as much; the mixture is measured on half of each text."""
    assert list(masks) == [*pair, MIXTURE]
    assert {mask.keep.achieved_ratio for mask in masks.values()} == {0.5}
    assert len({mask.keep.fingerprint for mask in masks.values()}) == 3
    mixed = Calibration(f"0.5*{pair[0]} + 0.5*{pair[1]}")
    expected = bench.importance(mixed).scores("heapr")
    assert masks[MIXTURE].scores.tolist() == expected.tolist()
    windows = bench.calibration_set(mixed)
    assert (
        windows.n_sequences == bench.calibration_set(Calibration(pair[0])).n_sequences
    )


def test_losses_are_those_of_the_masked_model(
    bench: Workbench, pair: tuple[str, str], masks: dict[str, ScoredMask]
) -> None:
    """Every mask on every text, against the dense model there."""
    losses = mask_losses(bench, masks, pair)
    assert len(losses) == 6
    for row in losses.itertuples():
        expected = by_hand(bench, masks[row.mask].keep, row.dataset)
        assert row.delta_nll == pytest.approx(expected, abs=1e-12)
    assert losses["delta_nll"].nunique() == 6


def test_those_that_the_other_needs_most_come_first() -> None:
    """They are atoms that it keeps; one that both remove is not among them."""
    mine = scored("000110", [1, 2, 3, 8, 9, 0])
    other = scored("101101", [7, 1, 5, 6, 2, 9])
    assert removed_alone(mine, other).tolist() == [5, 0, 2]
    assert removed_alone(other, mine).tolist() == [4]


def test_what_a_third_mask_keeps_of_them() -> None:
    """The share of the first, of the first two, and of all three."""
    mine = scored("000110", [1, 2, 3, 8, 9, 0])
    other = scored("101101", [7, 1, 5, 6, 2, 9])
    third = scored("011111", [0.0] * 6).keep
    table = kept_of_alone(third, mine, other, shares=(0.1, 0.7, 1.0))
    assert table["n_atoms"].tolist() == [1, 2, 3]
    assert table["kept"].tolist() == pytest.approx([1, 1 / 2, 2 / 3])
    assert table["share"].tolist() == [0.1, 0.7, 1.0]
    assert kept_of_alone(third, mine, mine).empty
    with pytest.raises(SpecError, match="different models"):
        kept_of_alone(KeepMask.from_arrays({1: [[True]]}), mine, other)


def test_as_many_of_each_layer_are_drawn() -> None:
    """From all that are removed, each at most once; seeds differ, and repeat."""
    rng = np.random.default_rng(0)
    keep = KeepMask.from_arrays(
        {1: rng.random((3, 20)) < 0.4, 5: rng.random((2, 9)) < 0.4}
    )
    removed = np.flatnonzero(~keep.rows)
    rows = np.concatenate([removed[removed < 60][:7], removed[removed >= 60][:2]])
    draws = [drawn_like(keep, rows, seed=seed) for seed in (0, 0, 1)]
    for drawn in draws:
        assert len(set(drawn.tolist())) == 9
        assert (drawn < 60).sum() == 7
        assert set(drawn.tolist()) <= set(removed.tolist())
    assert draws[0].tolist() == draws[1].tolist() != draws[2].tolist()
    seen = {
        int(row) for seed in range(200) for row in drawn_like(keep, rows, seed=seed)
    }
    assert seen == set(removed.tolist())


def test_atoms_that_are_put_back_are_kept() -> None:
    """Nothing else changes, and neither does the mask itself."""
    keep = scored("000110", [0.0] * 6).keep
    assert with_rows(keep, np.array([0, 5])).rows.tolist() == [
        True,
        False,
        False,
        True,
        True,
        True,
    ]
    assert keep.rows.tolist() == [False, False, False, True, True, False]


def test_restored_losses(
    bench: Workbench, pair: tuple[str, str], masks: dict[str, ScoredMask]
) -> None:
    """At each share what is measured by hand; all of them is the union of both."""
    mask, other = (masks[name] for name in pair)
    losses = restored_losses(bench, mask, other, pair[1], shares=SHARES)
    alone = removed_alone(mask, other)
    counts = [max(1, round(share * len(alone))) for share in SHARES]
    ranked = losses[losses["restored"].eq(RANKED)]
    assert ranked["n_restored"].tolist() == counts
    before = by_hand(bench, mask.keep, pair[1])
    for row in ranked.itertuples():
        keep = with_rows(mask.keep, alone[: row.n_restored])
        expected = by_hand(bench, keep, pair[1])
        assert row.delta_nll == pytest.approx(expected, abs=1e-12)
        if before > 0:
            assert row.explained == pytest.approx(1 - expected / before, abs=1e-6)
        else:
            assert math.isnan(row.explained)
    union = with_rows(mask.keep, alone)
    assert (union.rows == mask.keep.rows | other.keep.rows).all()
    drawn = losses[losses["restored"].eq(DRAWN)]
    assert (
        drawn["n_restored"].tolist()
        == np.repeat(counts, bench.profile.n_seeds).tolist()
    )
    assert drawn["draw"].tolist() == [*range(bench.profile.n_seeds)] * len(SHARES)
    last = drawn[drawn["draw"].eq(1)].iloc[1]
    keep = with_rows(mask.keep, drawn_like(mask.keep, alone[: counts[1]], seed=1))
    assert last["delta_nll"] == pytest.approx(by_hand(bench, keep, pair[1]), abs=1e-12)


def test_equal_masks_explain_nothing(
    bench: Workbench, pair: tuple[str, str], masks: dict[str, ScoredMask]
) -> None:
    """There are no atoms to put back, so there are no rows."""
    mask = masks[pair[0]]
    losses = restored_losses(bench, mask, mask, pair[0], shares=SHARES)
    assert losses.empty
    assert "explained" in losses
