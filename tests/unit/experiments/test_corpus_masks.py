"""Masks of two texts and of half of each: what they remove, and what that costs."""

from pathlib import Path

import pytest
from tiny_folder import write_text

from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.experiments.corpus_masks import MIXTURE, corpus_masks, mask_losses
from heapr_lab.inspection.mask_diff import ScoredMask
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import masking
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench


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
