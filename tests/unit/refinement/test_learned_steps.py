"""Learned masks step by step: starts, batches, cuts, and a training run by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of
from scipy.optimize import brentq
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import evaluate_divergence
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import find_experts
from heapr_lab.models.modes import differentiating
from heapr_lab.progress import no_report
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking
from heapr_lab.refinement import learned_masks
from heapr_lab.refinement.distillation import Teacher
from heapr_lab.refinement.learned_masks import learn_mask, soft_gates
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=6))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A tiny qwen2_moe in float64: 64 atoms in 2 layers."""
    return tiny_model("qwen2_moe")


@pytest.fixture(scope="module")
def table(model: nn.Module) -> ImportanceTable:
    """Its statistics."""
    return collect_statistics(model, WINDOWS)


# --- by hand ----------------------------------------------------------------------


def gates_by_hand(
    logits: torch.Tensor, n_kept: int, temperature: float
) -> torch.Tensor:
    """Gates at the root that a library finds."""

    def excess(t: float) -> float:
        return float(torch.sigmoid((logits - t) / temperature).sum()) - n_kept

    root = brentq(excess, logits.min() - 9, logits.max() + 9, xtol=1e-15)
    return torch.sigmoid((logits - root) / temperature)


@pytest.mark.parametrize("temperature", [0.3, 0.01])
def test_gates_are_those_of_the_root(temperature: float) -> None:
    """Also of one atom that stays, or goes, in a thousand."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(1000, dtype=torch.float64, generator=generator)
    for n_kept in (1, 400, 999):
        torch.testing.assert_close(
            soft_gates(logits, n_kept, temperature=temperature),
            gates_by_hand(logits, n_kept, temperature),
            rtol=1e-6,
            atol=1e-9,
        )


def gated_kl(
    model: nn.Module, gates: list[torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """Mean KL(dense || gated), with gates (E, I) as factors of W_down's columns."""
    downs = {
        f"{layer.name}.down_proj": layer.down.detach() * gate[:, None, :]
        for layer, gate in zip(find_experts(model), gates, strict=True)
    }
    log_p = logits_of(model, ids)[:, :-1].log_softmax(-1)
    out = torch.func.functional_call(model, downs, (ids,), {"use_cache": False})
    log_q = out.logits[:, :-1].log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def trained_by_hand(
    model: nn.Module, logits: torch.Tensor, n_kept: int, n_steps: int, rate: float
) -> torch.Tensor:
    """Adam on all windows, the temperature falling from 3 to 1/2 per cent."""
    z = logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([z], lr=rate, eps=1e-20)
    for step in range(n_steps):
        temperature = 0.03 * (1 / 6) ** (step / (n_steps - 1))
        gates = gates_by_hand(z.detach(), n_kept, temperature).requires_grad_()
        parts = [part.view(4, 8) for part in gates.split(32)]
        (slope,) = torch.autograd.grad(gated_kl(model, parts, WINDOWS.ids), gates)
        s = (gates * (1 - gates)).detach()
        z.grad = s / temperature * (slope - (s * slope).sum() / s.sum())
        optimizer.step()
    return z.detach()


@pytest.mark.parametrize("n_steps", [2, 7])
def test_training_is_adam_on_the_logits(
    model: nn.Module, table: ImportanceTable, n_steps: int
) -> None:
    """Step by step the same logits, with weights instead of masks and no threshold."""
    layers = find_experts(model)
    start = learned_masks._start_logits(table, "fisher", 32)
    logits = start.clone().requires_grad_()
    seen: list[tuple[int, int]] = []
    with differentiating(model):
        learned_masks._train(
            logits,
            layers,
            Teacher(model, WINDOWS.ids, 2),
            n_kept=32,
            batches=[torch.arange(6)] * n_steps,
            learning_rate=0.02,
            progress=lambda *now: seen.append(now),
        )
    expected = trained_by_hand(model, start, 32, n_steps, 0.02)
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-6, atol=1e-9)
    assert (expected - start).abs().max() > 0.02
    assert seen == [(step + 1, n_steps) for step in range(n_steps)]


def test_one_step_is_taken_at_the_first_temperature(
    model: nn.Module, table: ImportanceTable
) -> None:
    """Without progress, and without dividing by no steps at all."""
    logits = learned_masks._start_logits(table, "fisher", 32).requires_grad_()
    start = logits.detach().clone()
    with differentiating(model):
        learned_masks._train(
            logits,
            find_experts(model),
            Teacher(model, WINDOWS.ids, 2),
            n_kept=32,
            batches=[torch.arange(6)],
            learning_rate=0.02,
            progress=no_report,
        )
    step = (logits.detach() - start).abs()
    assert step.max().item() == pytest.approx(0.02)


def test_logits_start_as_ranks() -> None:
    """Counted from between what goes and what stays, as shares; ties in order."""
    frame = pd.DataFrame({"layer": 0, "expert": 0, "atom": range(5), "tokens": 1})
    sums = {"sum_hg2": [3.0, 1.0, 2.0, 1.0, 9.0], "sum_h2": [1.0, 5, 4, 3, 2]}
    ranked = ImportanceTable.from_frame(frame.assign(sum_g2=1.0, **sums), N=1)
    by_fisher = learned_masks._start_logits(ranked, "fisher", 2)
    assert by_fisher.tolist() == pytest.approx([0.3, -0.3, 0.1, -0.1, 0.5])
    by_heapr = learned_masks._start_logits(ranked, "heapr", 1)
    assert by_heapr.tolist() == pytest.approx([-0.1, 0.7, 0.5, 0.3, 0.1])


def test_of_many_equal_scores_the_first_start_lowest() -> None:
    """As a stable sort has it; of the same logits the first are cut, too."""
    frame = pd.DataFrame({"layer": 0, "expert": 0, "atom": range(100), "tokens": 1})
    scores = np.random.default_rng(0).integers(1, 4, 100)
    ranked = ImportanceTable.from_frame(frame.assign(sum_hg2=2.0 * scores), N=1)
    order = sorted(range(100), key=scores.__getitem__)
    start = learned_masks._start_logits(ranked, "fisher", 30)
    assert start.argsort().tolist() == order
    keep = select(ranked, ratio=0.3, estimator="fisher")
    cut = learned_masks._cut(torch.from_numpy(scores / 100), keep)
    assert np.flatnonzero(~cut.rows).tolist() == sorted(order[:30])


@pytest.mark.parametrize(("n_windows", "size"), [(6, 2), (5, 2), (3, 7), (4, 4)])
def test_windows_come_as_often_as_each_other(n_windows: int, size: int) -> None:
    """In a new order each time round; the seed decides which."""
    batches = learned_masks._batches(n_windows, size, 10, 0)
    assert [len(batch) for batch in batches] == [size] * 10
    windows = torch.cat(batches).tolist()
    rounds = [windows[i : i + n_windows] for i in range(0, len(windows), n_windows)]
    for own in rounds:
        assert len(set(own)) == len(own)
    assert all(sorted(own) == [*range(n_windows)] for own in rounds[:-1])
    assert len({tuple(own) for own in rounds}) > 1
    same, other = (learned_masks._batches(n_windows, size, 10, s) for s in (0, 1))
    assert torch.equal(torch.cat(same), torch.cat(batches))
    assert not torch.equal(torch.cat(other), torch.cat(batches))


def test_the_lowest_logits_are_cut() -> None:
    """As many as the start removes; of equal ones the first; each in its layer."""
    arrays = {2: [[True, False]], 5: [[True, False], [True, False]]}
    start = KeepMask.from_arrays(arrays, estimator="fisher")
    logits = torch.tensor([0.1, 0.2, 0.0, 0.1, 0.1, 0.3], dtype=torch.float64)
    cut = learned_masks._cut(logits, start)
    assert {k: kept.tolist() for k, kept in cut.arrays.items()} == {
        2: [[False, True]],
        5: [[False, False], [True, True]],
    }


@pytest.mark.parametrize("batch_size", [1, 4, 6])
def test_losses_are_means_over_all_windows(
    model: nn.Module, table: ImportanceTable, batch_size: int
) -> None:
    """Whatever the size of the last batch."""
    keep = select(table, ratio=0.5)
    teacher = Teacher(model, WINDOWS.ids, 2)
    found = learned_masks._calibration_kl(teacher, keep, batch_size)
    expected = evaluate_divergence(model, keep, WINDOWS.ids).kl
    assert found == pytest.approx(expected, rel=1e-9)


# --- what a mask says of it -------------------------------------------------------


def test_all_that_determined_a_mask_is_in_its_settings(
    model: nn.Module, table: ImportanceTable
) -> None:
    """By default fisher scores, seed 0 and a rate of 1/100, besides both losses."""
    keep = learn_mask(model, table, WINDOWS, ratio=0.5, n_steps=2)
    learned = keep.settings["learned"]
    losses = learned.pop("calibration_kl")
    assert learned == {
        "calibration": WINDOWS.fingerprint,
        "n_steps": 2,
        "batch_size": 8,
        "learning_rate": 0.01,
        "temperatures": [0.03, 0.005],
        "seed": 0,
    }
    assert losses.keys() == {"start", "learned"}
    start = select(table, ratio=0.5, estimator="fisher").settings
    assert {name: keep.settings[name] for name in start} == start
    ranked = learn_mask(model, table, WINDOWS, ratio=0.5, n_steps=2, estimator="heapr")
    assert ranked.settings["estimator"] == "heapr"


def test_by_default_there_are_200_steps(
    model: nn.Module, table: ImportanceTable
) -> None:
    """And a run that is stopped leaves the model as it was."""

    def stop(*done: int) -> None:
        assert done == (1, 200)
        raise InterruptedError

    dense = logits_of(model, WINDOWS.ids)
    with pytest.raises(InterruptedError):
        learn_mask(model, table, WINDOWS, ratio=0.5, progress=stop)
    assert torch.equal(logits_of(model, WINDOWS.ids), dense)


def test_a_masked_model_is_not_learned_from(
    model: nn.Module, table: ImportanceTable
) -> None:
    """Its predictions are not the dense model's."""
    start = select(table, ratio=0.5)
    with masking(model, start), pytest.raises(SpecError, match="begin again with"):
        learn_mask(model, table, WINDOWS, ratio=0.5, n_steps=1)


def test_ratios_that_remove_nothing_name_the_count(
    model: nn.Module, table: ImportanceTable
) -> None:
    """One atom of 64 is enough."""
    with pytest.raises(SpecError, match=r"ratio 0\.015 of 64 atoms removes none"):
        learn_mask(model, table, WINDOWS, ratio=0.015)
    keep = learn_mask(model, table, WINDOWS, ratio=1 / 64, n_steps=1)
    assert keep.n_removed == math.floor(1 / 64 * 64) == 1
    assert np.count_nonzero(~keep.rows) == 1
