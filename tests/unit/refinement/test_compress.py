"""Compression in the best of several ways: never worse than HEAPr, and counted."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from families import tiny_ids, tiny_model
from torch import nn

import heapr_lab
from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity, window_nll
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.models.identity import weights_state
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking
from heapr_lab.refinement.activation_grams import HELD_OUT, collect_grams
from heapr_lab.refinement.candidates import CANDIDATES, PAPER, Candidate, usable
from heapr_lab.refinement.compress import FittedCompression, fit_compression
from heapr_lab.refinement.portfolio import Portfolio
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=8, seq_len=12))
HALF = Selection(0.5)
FEW = (Candidate("elimination"), Candidate("fisher", "expert"))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A tiny qwen2_moe: 4 experts of 8 atoms in each of 2 layers."""
    return tiny_model("qwen2_moe")


@pytest.fixture(scope="module")
def portfolio(model: nn.Module) -> Portfolio:
    """Its statistics and sums."""
    return Portfolio(model, WINDOWS)


@pytest.fixture(scope="module")
def found(model: nn.Module, portfolio: Portfolio) -> FittedCompression:
    """Half of its atoms removed."""
    return fit_compression(model, WINDOWS, HALF, portfolio=portfolio)


def report(found: FittedCompression, fitted_to: str) -> pd.DataFrame:
    """The rows of one group, by candidate."""
    rows = found.report[found.report["fitted_to"].eq(fitted_to)]
    return rows.set_index("candidate")


# --- the promise ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "nemotron_h"])
def test_it_is_never_worse_than_heapr_on_held_out_windows(family: str) -> None:
    """Whatever the ratio: against the paper's mask of all windows, measured here."""
    model = tiny_model(family)
    table = collect_statistics(model, WINDOWS)
    held_out = WINDOWS.ids[1::4]
    portfolio = Portfolio(model, WINDOWS)
    for ratio in (0.0, 0.1, 0.5, 0.9):
        found = fit_compression(model, WINDOWS, ratio=ratio, portfolio=portfolio)
        with masking(model, select(table, ratio=ratio)):
            paper = evaluate_perplexity(model, held_out).nll
        with masking(model, found.keep, found.downs):
            ours = evaluate_perplexity(model, held_out).nll
        assert ours <= paper + 1e-12
        assert found.keep.n_kept == select(table, ratio=ratio).n_kept


def test_where_the_paper_is_the_best_it_is_taken(
    model: nn.Module, portfolio: Portfolio
) -> None:
    """Against a candidate that is worse, with unchanged weights."""
    worst = (Candidate("magnitude", "unchanged"),)
    found = fit_compression(model, WINDOWS, HALF, candidates=worst, portfolio=portfolio)
    rows = report(found, "fit")
    assert rows.loc["magnitude, weights unchanged", "against_paper"] > 0
    assert (found.candidate, found.downs) == (PAPER, None)
    table = collect_statistics(model, WINDOWS)
    assert found.keep.fingerprint == select(table, ratio=0.5).fingerprint


def test_all_candidates_are_in_the_report(found: FittedCompression) -> None:
    """HEAPr first; the best, and HEAPr, once more on all windows."""
    rows = report(found, "fit")
    assert rows.index.tolist() == [c.name for c in CANDIDATES]
    assert len(rows) == 11
    last = report(found, "all")
    assert last.index.tolist() == [PAPER.name, rows["nll"].idxmin()]
    assert last["nll"].idxmin() == found.candidate.name
    chosen = found.report.loc[found.report["chosen"]]
    assert chosen[["candidate", "fitted_to"]].to_numpy().tolist() == [
        [found.candidate.name, "all"]
    ]
    assert found.keep.settings["candidate"] == found.candidate.name


def test_the_report_has_the_measured_losses(
    model: nn.Module, found: FittedCompression
) -> None:
    """Of the windows held out; differences to HEAPr are paired by window."""
    held_out = WINDOWS.ids[1::4]
    dense = window_nll(model, held_out)
    table = collect_statistics(model, WINDOWS)
    with masking(model, select(table, ratio=0.5)):
        paper = window_nll(model, held_out)
    with masking(model, found.keep, found.downs):
        ours = window_nll(model, held_out)
    row = report(found, "all").loc[found.candidate.name]
    assert row["nll"] == pytest.approx(float(ours.mean()), rel=1e-12)
    assert row["delta_nll"] == pytest.approx(float((ours - dense).mean()))
    assert row["against_paper"] == pytest.approx(float((ours - paper).mean()))
    # Of two windows, the standard error is half of the difference.
    half = float((ours - paper).diff().abs()) / 2
    assert row["stderr"] == pytest.approx(half)


def test_the_model_that_comes_back_is_the_one_that_was_judged(
    model: nn.Module, found: FittedCompression
) -> None:
    """`compress` prunes, and leaves the dense model as it was."""
    before = weights_state(model)
    smaller: Any = heapr_lab.compress(model, WINDOWS, ratio=0.5)
    assert weights_state(model) == before
    drop = ["seconds"]
    pd.testing.assert_frame_equal(
        smaller.heapr_report.drop(columns=drop), found.report.drop(columns=drop)
    )
    row = report(found, "all").loc[found.candidate.name]
    nll = evaluate_perplexity(smaller, WINDOWS.ids[1::4]).nll
    assert nll == pytest.approx(row["nll"], rel=1e-9)


def test_new_weights_say_how_they_were_made() -> None:
    """Where a candidate that compensates is the best, as for most tiny models."""
    for seed in range(8):
        model = tiny_model("qwen2_moe", seed=seed)
        smaller: Any = heapr_lab.compress(model, WINDOWS, ratio=0.5, candidates=FEW)
        report = smaller.heapr_report
        compensated = bool(report["candidate"].iloc[-1] != PAPER.name)
        compensated &= bool(report["chosen"].iloc[-1])
        assert hasattr(smaller, "heapr_weights") == compensated
        if compensated:
            assert "compensated by least squares" in smaller.heapr_weights
            return
    pytest.fail("none of 8 models is better compensated")


# --- what is held out -------------------------------------------------------------


def test_candidates_do_not_see_the_windows_that_judge_them(model: nn.Module) -> None:
    """Other held-out windows: the same masks, and the same weights at a ridge."""
    others = WINDOWS.ids.clone()
    others[1::4] = tiny_ids(n_sequences=2, seq_len=12, seed=9)
    masks = []
    for ids in (WINDOWS.ids, others):
        portfolio = Portfolio(model, CalibrationSet.from_ids(ids))
        masks.append(
            [portfolio.trial(c, HALF, windows="fit").keep.fingerprint for c in FEW]
        )
        solver = next(iter(portfolio.sums.solvers("layer")))
        kept = torch.arange(32).view(4, 8) % 3 > 0
        masks[-1].append(solver.solve(kept, 0.1, fit_only=True)[0].tolist())
    assert masks[0] == masks[1]


def test_three_of_four_windows_are_fitted_to() -> None:
    """The second of every four is held out; every window is in one part."""
    fit, held_out = WINDOWS.split()
    assert torch.equal(held_out.ids, WINDOWS.ids[[1, 5]])
    assert torch.equal(fit.ids, WINDOWS.ids[[0, 2, 3, 4, 6, 7]])
    assert (fit.provenance["part"], held_out.provenance["part"]) == ("fit", "held out")
    with pytest.raises(SpecError, match="there is 1 window, expected at least 2"):
        CalibrationSet.from_ids(tiny_ids(n_sequences=1)).split()


def test_the_statistics_of_all_windows_are_those_of_one_pass(
    model: nn.Module, portfolio: Portfolio
) -> None:
    """In numbers, and in what the table says of itself."""
    ours, once = (
        portfolio.table("heapr", windows="all"),
        collect_statistics(model, WINDOWS),
    )
    for name, values in once.frame.items():
        np.testing.assert_allclose(ours.frame[name], values, rtol=1e-12, atol=1e-300)
    for name in ("N", "windows", "spec", "spec_hash", "architecture"):
        assert ours.metadata[name] == once.metadata[name]
    given = "calibration"
    assert ours.metadata["provenance"][given] == once.metadata["provenance"][given]


def test_the_spans_share_one_pass(model: nn.Module, portfolio: Portfolio) -> None:
    """Sums within experts are blocks of those across the layer."""
    within = collect_grams(model, WINDOWS, span="expert")
    for solver in portfolio.sums.solvers("expert"):
        torch.testing.assert_close(solver.grams.sums, within[solver.layer.layer].sums)
        assert solver.grams.sums[HELD_OUT].any()
    assert portfolio.sums.n_passes == 1


# --- cost -------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The windows of every forward pass; those with a backward pass count thrice."""
    counts: list[float] = []
    embed = F.embedding

    def count(ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        counts.append(len(ids) * (3.0 if torch.is_grad_enabled() else 1.0))
        return embed(ids, *args, **options)

    monkeypatch.setattr(F, "embedding", count)
    return counts


def test_passes_are_those_that_were_run(seen: list[float]) -> None:
    """With all candidates fewer than 10; a second ratio takes only its trials."""
    model = tiny_model("qwen2_moe")
    portfolio = Portfolio(model, WINDOWS)
    first = fit_compression(model, WINDOWS, HALF, portfolio=portfolio)
    assert first.passes == pytest.approx(sum(seen) / 8)
    # 3 for statistics, 1 for sums, and a quarter for 11 + 2 trials and the dense model.
    assert first.passes == pytest.approx(4 + 14 / 4)
    seen.clear()
    second = fit_compression(model, WINDOWS, ratio=0.2, portfolio=portfolio)
    assert second.passes == pytest.approx(sum(seen) / 8)
    assert second.passes <= 13 / 4


def test_quick_tries_one_candidate(model: nn.Module, portfolio: Portfolio) -> None:
    """Besides HEAPr."""
    found = fit_compression(model, WINDOWS, HALF, quick=True, portfolio=portfolio)
    assert report(found, "fit").index.tolist() == [PAPER.name, CANDIDATES[1].name]


def test_after_the_time_budget_no_candidate_is_begun(
    model: nn.Module, portfolio: Portfolio
) -> None:
    """Each look at the clock is a second later; two are tried without looking."""
    for budget, n_tried in ((0.0, 2), (2.0, 4)):
        now = iter(range(100))
        found = fit_compression(
            model,
            WINDOWS,
            HALF,
            time_budget=budget,
            portfolio=portfolio,
            clock=lambda now=now: float(next(now)),  # type: ignore[misc]
        )
        assert len(report(found, "fit")) == n_tried


def test_progress_reaches_its_end(model: nn.Module) -> None:
    """It only grows, and ends at the number it named from the beginning."""
    seen: list[tuple[int, int]] = []
    fit_compression(
        model, WINDOWS, HALF, candidates=FEW, progress=lambda *now: seen.append(now)
    )
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    assert done[-1] <= totals[-1]


# --- what is refused --------------------------------------------------------------


def test_candidates_across_normalised_experts_are_left_out() -> None:
    """They cannot compensate each other; without others there is nothing to try."""
    names = [c.name for c in usable(CANDIDATES, across=False)]
    assert names[0] == PAPER.name
    assert len(names) == 6
    model = tiny_model("qwen2_moe")
    for layer in find_experts(model):
        layer.module.has_post_expert_norm = True
        layer.module.post_expert_norm = nn.Identity()
    with pytest.raises(SpecError, match="no candidate besides HEAPr as published"):
        fit_compression(model, WINDOWS, HALF, candidates=[Candidate("fisher")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"estimator": "best"}, "estimator 'best'"),
        ({"weights": "kept"}, "weights is 'kept', expected one of unchanged"),
    ],
)
def test_candidates_are_checked(fields: dict[str, str], message: str) -> None:
    """When they are made."""
    with pytest.raises(SpecError, match=message):
        Candidate(**{"estimator": "fisher", **fields})


def test_a_masked_model_is_refused(model: nn.Module, found: FittedCompression) -> None:
    """Its statistics would be those of the mask."""
    with masking(model, found.keep), pytest.raises(SpecError, match="begin again"):
        fit_compression(model, WINDOWS, HALF)


def test_it_is_shown_in_a_line(found: FittedCompression) -> None:
    """What was chosen, what it gains, and what it cost."""
    assert repr(found).startswith(
        f"FittedCompression(chosen {found.candidate.name}, pruning"
    )
    assert "forward passes" in found._repr_html_()
