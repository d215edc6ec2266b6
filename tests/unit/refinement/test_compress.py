"""A compensated mask, or HEAPr's: decided and reported on unseen windows."""

import math
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from families import model_with_sink, tiny_model, tiny_windows
from heard import Heard
from keeps import masked_nll, window_nll
from torch import nn

import heapr_lab
from heapr_lab import CalibrationSet, Selection, collect_statistics, masking, select
from heapr_lab.errors import SpecError
from heapr_lab.models.identity import weights_state
from heapr_lab.refinement import (
    activation_grams,
    calibrated,
    compensation,
    compress,
    descent,
)
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compress import COMPENSATED, PAPER, STEPS, fit_compression
from heapr_lab.refinement.descent import descended

WINDOWS = tiny_windows(n_sequences=24, seq_len=12)
FIT, DECIDING, REPORTED = WINDOWS.three_parts()
HALF = Selection(0.5)
FISHER, ELIMINATION = COMPENSATED


@pytest.fixture(scope="module")
def fitted(model) -> CalibratedModel:
    """The model's statistics and sums."""
    return CalibratedModel(model, FIT)


@pytest.fixture(scope="module")
def found(model, fitted) -> compress.FittedCompression:
    """The model with half of its atoms removed."""
    return fit_compression(model, WINDOWS, HALF, fitted=fitted)


def paper(model: nn.Module, ratio: float) -> Any:
    """HEAPr's mask of the windows that are fitted to."""
    return select(collect_statistics(model, FIT), ratio=ratio)


# --- the rule ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gains", "others", "chosen"),
    [
        ((0.9, 1.0, 1.1), (0.0, 0.0, 0.0), FISHER),
        ((0.9, 1.0, 1.1), (1.1, 1.2, 1.3), ELIMINATION),
        ((0.9, 1.0, 1.1), (1.0, 1.3, 0.9), FISHER),  # 0.07 ± 0.13 more is a tie
        ((0.9, 1.0, 1.1), (0.0, 9.0, 9.0), FISHER),  # the other gains more, with noise
        ((0.0, 1.0, 2.0), (0.0, 0.0, 0.0), PAPER),  # 1 ± 0.58: not by two errors
        ((0.1, 1.0, 2.0), (0.0, 1.0, 2.0), PAPER),
        ((0.5, 1.0, 1.5), (0.0, 0.0, 0.0), FISHER),
        ((-0.9, -1.0, -1.1), (-0.9, -1.0, -1.1), PAPER),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), PAPER),
    ],
)
def test_it_has_to_be_better_by_two_standard_errors(gains, others, chosen):
    """Losses are paired by window."""
    losses = (tuple(5.0 - gain for gain in row) for row in (gains, others))
    decided = {PAPER: (5.0, 5.0, 5.0)} | dict(zip(COMPENSATED, losses, strict=True))
    report = compress._report(decided, {})
    assert report.loc[report["chosen"], "made"].tolist() == [chosen]
    assert report[list(compress._REPORTED)].isna().all(axis=None)


def test_the_windows_that_are_reported_have_no_say():
    """What was decided stays, however large the loss on them; one row has none."""
    decided = {PAPER: (5.0, 5.0), FISHER: (4.0, 4.0), ELIMINATION: (5.0, 5.0)}
    reported = {PAPER: (4.0, 6.0), FISHER: (9.0, 9.0), "dense": (1.0, 3.0)}
    report = compress._report(decided, reported).set_index("made")
    assert report.index[report["chosen"]].tolist() == [FISHER]
    assert report.loc[FISHER, "delta_nll"] == 7.0
    assert report.loc[PAPER, "delta_nll"] == 3.0
    assert report.loc[FISHER, "against_paper"] == 4.0
    assert report.loc[ELIMINATION, list(compress._REPORTED)].isna().all()


def test_where_compensation_is_not_better_the_papers_mask_is_taken(
    model, fitted, monkeypatch
):
    """It is that of all windows, with unchanged weights."""
    monkeypatch.setattr(compensation, "STANDARD_ERRORS", math.inf)
    compression = fit_compression(model, WINDOWS, HALF, fitted=fitted)
    assert compression.down_projs is None
    published = select(collect_statistics(model, WINDOWS), ratio=0.5)
    assert compression.keep.fingerprint == published.fingerprint
    assert compression.keep.fingerprint != paper(model, 0.5).fingerprint
    assert compression.keep.settings["estimator"] == "heapr"
    assert compression.report[list(compress._REPORTED)].isna().all(axis=None)


@pytest.mark.parametrize("make", [model_with_sink, lambda: tiny_model("gpt_oss")])
def test_it_is_never_worse_than_heapr_on_the_windows_that_decide(make):
    """Whatever the ratio, with as many atoms; both are measured here.

    Each window begins with a token that is a sink to one of the models.
    """
    model, ids = make(), WINDOWS.ids.clone()
    ids[:, 0] = 0
    windows = CalibrationSet.from_ids(ids)
    fit, deciding, _ = windows.three_parts()
    fitted = CalibratedModel(model, fit)
    tables = [collect_statistics(model, text) for text in (fit, windows)]
    for ratio in (0.0, 0.1, 0.5, 0.9):
        compression = fit_compression(model, windows, ratio=ratio, fitted=fitted)
        of_fit, published = (select(table, ratio=ratio) for table in tables)
        theirs = masked_nll(model, deciding.ids, of_fit)
        ours = masked_nll(model, deciding.ids, compression.keep, compression.down_projs)
        if compression.down_projs is None:
            assert compression.keep.fingerprint == published.fingerprint
        else:
            assert float((ours - theirs).mean()) <= 1e-12
        assert compression.keep.n_kept == published.n_kept


def test_the_report_has_the_measured_losses(model, fitted, monkeypatch):
    """The losses are of windows that have no part in the fit and in the choice."""
    monkeypatch.setattr(compensation, "STANDARD_ERRORS", -math.inf)
    compression = fit_compression(model, WINDOWS, HALF, fitted=fitted)
    rows = compression.report.set_index("made")
    assert rows.index.tolist() == [PAPER, FISHER, ELIMINATION]
    assert rows.index[rows["chosen"]].tolist() == [ELIMINATION]
    assert rows.loc[FISHER, list(compress._REPORTED)].isna().all()
    keep, weights = fitted.compensated(Selection(0.5, estimator="elimination"))
    row = rows.loc[ELIMINATION]
    for difference, error, windows in (
        ("deciding", "deciding_stderr", DECIDING),
        ("against_paper", "stderr", REPORTED),
    ):
        ours = masked_nll(model, windows.ids, keep, weights.down_projs)
        apart = ours - masked_nll(model, windows.ids, paper(model, 0.5))
        assert row[difference] == pytest.approx(float(apart.mean()))
        assert row[error] == pytest.approx(float(apart.std()) / len(apart) ** 0.5)
    dense = window_nll(model, REPORTED.ids)
    assert row["nll"] == pytest.approx(float(ours.mean()), rel=1e-12)
    assert row["delta_nll"] == pytest.approx(float((ours - dense).mean()))
    assert rows.loc[PAPER, ["deciding", "against_paper"]].tolist() == [0.0, 0.0]


def test_the_model_that_comes_back_is_the_one_that_was_judged(model, monkeypatch):
    """`compress` prunes, and leaves the dense model as it was."""
    monkeypatch.setattr(compensation, "STANDARD_ERRORS", -math.inf)
    fitted = fit_compression(model, WINDOWS, HALF)
    assert fitted.down_projs is not None
    before = weights_state(model)
    smaller: Any = heapr_lab.compress(model, WINDOWS, ratio=0.5)
    assert weights_state(model) == before
    pd.testing.assert_frame_equal(smaller.heapr_report, fitted.report)
    (nll,) = fitted.report.loc[fitted.report["chosen"], "nll"]
    ours = window_nll(smaller, REPORTED.ids)
    assert float(ours.mean()) == pytest.approx(nll, rel=1e-9)


@pytest.mark.parametrize("spoiled", [False, True])
def test_steps_are_taken_where_they_are_better(model, fitted, spoiled, monkeypatch):
    """From the better compensated mask, on windows of the fit; the others decide."""
    monkeypatch.setattr(descent, "FEWEST_TOKENS", 0)
    monkeypatch.setattr(
        compress, "is_less", lambda one, other: sum(one) < sum(other) + 0.1
    )
    keep, before = fitted.compensated(Selection(0.5, estimator="elimination"))
    after = descended(model, keep, before.down_projs, FIT)
    if spoiled:
        after = {number: -3 * down for number, down in after.items()}
        monkeypatch.setattr(compress, "descended", lambda *_: after)
    seen = Heard()
    compression = fit_compression(model, WINDOWS, HALF, fitted=fitted, progress=seen)
    rows = compression.report.set_index("made")
    *_, last = rows.index
    assert last == f"{ELIMINATION}{STEPS}"
    assert rows.index[rows["chosen"]].tolist() == [ELIMINATION if spoiled else last]
    ours = masked_nll(model, DECIDING.ids, keep, after)
    apart = ours - masked_nll(model, DECIDING.ids, paper(model, 0.5))
    assert rows.loc[last, "deciding"] == pytest.approx(float(apart.mean()))
    taken = before.down_projs if spoiled else after
    assert all(torch.equal(compression.down_projs[n], taken[n]) for n in taken)
    text = compensation.describe_weights(compression.compensation, WINDOWS)
    assert ("4 steps" in text) != spoiled
    assert len(set(seen[-1])) == 1


# --- what is held out -------------------------------------------------------------


def test_three_of_four_windows_are_fitted_to():
    """The second of every four is held out; every window is in one part."""
    fit, held_out = WINDOWS.split()
    assert torch.equal(held_out.ids, WINDOWS.ids[1::4])
    assert torch.equal(fit.ids, FIT.ids)
    assert (fit.provenance["part"], held_out.provenance["part"]) == ("fit", "held out")


def test_the_others_decide_and_are_reported_in_turns():
    """Fewer than two that decide have no standard error."""
    assert torch.equal(DECIDING.ids, WINDOWS.ids[[1, 9, 17]])
    assert torch.equal(REPORTED.ids, WINDOWS.ids[[5, 13, 21]])
    for n, sizes in ((8, [5, 2, 1]), (9, [6, 2, 1]), (10, [7, 2, 1])):
        few = tiny_windows(n_sequences=n)
        assert [part.n_sequences for part in few.three_parts()] == sizes
    with pytest.raises(SpecError, match="7 of 7 windows differ, expected at least 8"):
        tiny_windows(n_sequences=7).three_parts()


def test_a_window_that_repeats_is_in_one_part_once(model):
    """So none that decides, or that is reported, is fitted to."""
    repeated = CalibrationSet.from_ids(WINDOWS.ids[[0, 0, *range(24), *range(24)]])
    for part, expected in zip(
        repeated.three_parts(), WINDOWS.three_parts(), strict=True
    ):
        assert torch.equal(part.ids, expected.ids)
    with pytest.raises(SpecError, match="1 of 8 windows differ"):
        fit_compression(model, CalibrationSet.from_ids(WINDOWS.ids[[0] * 8]), HALF)


def test_windows_that_decide_are_refused_to_the_fit(model):
    """What earlier calls fitted to them, too, would be judged on what it has seen."""
    with pytest.raises(SpecError, match=r"is of .*24 windows.*, expected .*18 windows"):
        fit_compression(model, WINDOWS, HALF, fitted=CalibratedModel(model, WINDOWS))


# --- cost -------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch) -> list[float]:
    """The windows of every forward pass; those with a backward pass count thrice."""
    counts: list[float] = []
    embed = F.embedding

    def count(ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        counts.append(len(ids) * (3.0 if torch.is_grad_enabled() else 1.0))
        return embed(ids, *args, **options)

    monkeypatch.setattr(F, "embedding", count)
    return counts


def test_it_takes_less_than_twice_the_scores(seen, monkeypatch):
    """Counted in passes; a second ratio takes those over the held-out windows alone."""
    model = tiny_model("qwen2_moe")
    collect_statistics(model, WINDOWS)
    scores = sum(seen)
    seen.clear()
    fitted = CalibratedModel(model, FIT)
    fit_compression(model, WINDOWS, HALF, fitted=fitted)
    # 3 for statistics and 1 for sums of 3/4, and 3 of an eighth; and 3 for the
    # statistics of the others, as HEAPr's mask is returned.
    assert sum(seen) / 24 == pytest.approx(4 * 3 / 4 + 3 / 8 + 3 / 4)
    assert sum(seen) < 2 * scores
    seen.clear()
    fit_compression(model, WINDOWS, ratio=0.2, fitted=fitted)
    assert sum(seen) / 24 == pytest.approx(3 / 8)
    seen.clear()
    monkeypatch.setattr(compensation, "STANDARD_ERRORS", -math.inf)
    fit_compression(model, WINDOWS, ratio=0.2, fitted=fitted)
    assert sum(seen) / 24 == pytest.approx(6 / 8)
    seen.clear()
    # Steps take 4 passes over at most half of the fit; of so few tokens, over all.
    longest = descent.MOST_TOKENS / descent.FEWEST_TOKENS
    assert (4 + 4 * longest) * 3 / 4 + 7 / 8 < 2 * 3
    monkeypatch.setattr(descent, "FEWEST_TOKENS", 0)
    fit_compression(model, WINDOWS, ratio=0.2, fitted=fitted)
    assert sum(seen) / 24 == pytest.approx(7 / 8 + 4 * 3 / 4)


@pytest.mark.parametrize(("room", "n_sums"), [(2**32, 1), (1, 2)])
def test_sums_that_are_not_kept_take_two_passes(
    model, found, room, n_sums, monkeypatch
):
    """The result is the same; progress only grows, to the number named first."""
    monkeypatch.setattr(activation_grams, "_AT_ONCE", room)
    passes = Mock(wraps=activation_grams.iter_grams)
    monkeypatch.setattr(calibrated, "iter_grams", passes)
    scores = Mock(wraps=calibrated.EliminationScores)
    monkeypatch.setattr(calibrated, "EliminationScores", scores)
    seen, fitted = Heard(), CalibratedModel(model, FIT)
    compression = fit_compression(model, WINDOWS, HALF, fitted=fitted, progress=seen)
    pd.testing.assert_frame_equal(compression.report, found.report)
    assert passes.call_count == n_sums
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {(1 + n_sums) * 18 + 6 * 3}
    assert done[-1] == totals[-1]
    fit_compression(model, WINDOWS, ratio=0.2, fitted=fitted)
    assert scores.call_count == n_sums - 1  # another ratio has the same scores


@pytest.mark.parametrize("errors", [math.inf, -math.inf])
def test_progress_ends_whatever_is_chosen(model, errors, monkeypatch):
    """Where compensation is better, and where HEAPr's mask is, measured or known."""
    monkeypatch.setattr(compensation, "STANDARD_ERRORS", errors)
    fitted = CalibratedModel(model, FIT)
    for _ in range(2):
        seen = Heard()
        fit_compression(model, WINDOWS, HALF, fitted=fitted, progress=seen)
        done, total = seen[-1]
        assert done == total


# --- what is refused --------------------------------------------------------------


def test_a_masked_model_is_refused(model, found):
    """Its statistics would be those of the mask."""
    with masking(model, found.keep), pytest.raises(SpecError, match="begin again"):
        fit_compression(model, WINDOWS, HALF)
