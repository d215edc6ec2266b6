"""Learned masks: the budget, the gradients, what training finds and what it leaves."""

import math

import numpy as np
import pytest
import torch
from families import D_VOCAB, tiny_ids, tiny_model
from keeps import full_keep, logits_of, random_keep
from oracles.token_by_token import matrices
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import evaluate_divergence
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models import likelihood
from heapr_lab.models.experts import find_experts
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking
from heapr_lab.refinement.distillation import Teacher
from heapr_lab.refinement.learned_masks import learn_mask, soft_gates
from heapr_lab.text.calibration import CalibrationSet

ROUNDING = 1e-12
"""float64, sums of a few dozen terms."""
WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=6))


@pytest.fixture
def model() -> nn.Module:
    """A tiny qwen2_moe in float64: 64 atoms in 2 layers."""
    return tiny_model("qwen2_moe")


def removed(keep: KeepMask) -> np.ndarray:
    """What goes, in the order of the table's rows."""
    return ~np.concatenate([*keep.arrays.values()], axis=None)


def kl_of(model: nn.Module, keep: KeepMask) -> float:
    """KL(dense || masked) on the windows, as `evaluation` measures it."""
    return evaluate_divergence(model, keep, WINDOWS.ids).kl


# --- gates ------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.005, 1e-5])
@pytest.mark.parametrize("n_kept", [1, 20, 39])
def test_gates_sum_to_the_budget(n_kept: int, temperature: float) -> None:
    """At every temperature, also with equal logits and with a gap at the threshold."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(40, dtype=torch.float64, generator=generator)
    gap = torch.arange(40, dtype=torch.float64).sub(39.5 - n_kept).sign()
    for logits in (spread, torch.zeros_like(spread), gap):
        gates = soft_gates(logits, n_kept, temperature=temperature)
        assert gates.sum().item() == pytest.approx(n_kept, abs=1e-9)
        assert ((gates >= 0) & (gates <= 1)).all()
        assert (gates.diff()[logits.diff() > 0] >= 0).all()


def test_cold_gates_are_the_mask() -> None:
    """At a low temperature the gates of the largest logits are 1, all others 0."""
    logits = torch.tensor([0.3, -0.2, 0.1, 0.9], dtype=torch.float64)
    gates = soft_gates(logits, 2, temperature=1e-4)
    expected = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(gates, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("temperature", [0.7, 0.1, 0.02])
def test_gradients_of_gates_are_finite_differences(temperature: float) -> None:
    """The whole Jacobian, threshold included; each of its columns sums to 0."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, dtype=torch.float64, generator=generator) / 2

    def gates(z: torch.Tensor) -> torch.Tensor:
        return soft_gates(z, 5, temperature=temperature)

    jacobian = torch.autograd.functional.jacobian(gates, logits)
    step = 1e-6
    by_hand = torch.stack(
        [
            (gates(logits + step * unit) - gates(logits - step * unit)) / (2 * step)
            for unit in torch.eye(12, dtype=torch.float64)
        ],
        dim=1,
    )
    torch.testing.assert_close(jacobian, by_hand, rtol=1e-6, atol=1e-8)
    assert jacobian.abs().max() > 0.1
    assert jacobian.sum(0).abs().max() < 1e-9


# --- the loss ---------------------------------------------------------------------


def masked_kl(model: nn.Module, keep: KeepMask, teacher: Teacher) -> torch.Tensor:
    """The teacher's loss of the masked model on windows 1 and 4."""
    with masking(model, keep):
        return teacher.mean_kl(model, torch.tensor([1, 4]))


def test_the_loss_is_the_divergence(model: nn.Module) -> None:
    """The teacher's mean KL is that of `evaluate_divergence`; of itself it is 0."""
    keep = random_keep(model)
    teacher = Teacher(model, WINDOWS.ids, batch_size=4)
    expected = evaluate_divergence(model, keep, WINDOWS.ids[[1, 4]]).kl
    got = masked_kl(model, keep, teacher).item()
    assert got == pytest.approx(expected, rel=1e-10)
    assert masked_kl(model, full_keep(model), teacher).item() == pytest.approx(0)
    assert expected > 1e-4


def test_the_loss_has_the_gradient_of_plain_autograd(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 3 of 16 tokens, with respect to a weight below the head."""
    monkeypatch.setitem(likelihood.LOGITS_AT_ONCE, "cpu", 3 * D_VOCAB)
    keep, weight = random_keep(model), model.model.norm.weight
    teacher = Teacher(model, WINDOWS.ids, batch_size=4)
    (got,) = torch.autograd.grad(3 * masked_kl(model, keep, teacher), weight)
    ids = WINDOWS.ids[[1, 4]]
    log_p = logits_of(model, ids)[:, :-1].log_softmax(-1)
    with masking(model, keep):
        log_q = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    (expected,) = torch.autograd.grad(3 * kl, weight)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=ROUNDING)


# --- learning ---------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.9])
def test_exactly_the_ratio_goes(model: nn.Module, ratio: float) -> None:
    """As many atoms as `select` removes, in the layers of the model."""
    table = collect_statistics(model, WINDOWS)
    keep = learn_mask(model, table, WINDOWS, ratio=ratio, n_steps=3)
    assert keep.n_removed == math.floor(ratio * 64)
    assert keep.layers == select(table, ratio=ratio).layers


def test_a_seed_gives_one_mask(model: nn.Module) -> None:
    """The same numbers again; all that determined them is in the settings."""
    table = collect_statistics(model, WINDOWS)
    options = {"ratio": 0.5, "n_steps": 12, "batch_size": 2, "seed": 3}
    one, two = (learn_mask(model, table, WINDOWS, **options) for _ in range(2))
    other = learn_mask(model, table, WINDOWS, **(options | {"seed": 4}))
    assert one == two
    assert one.settings == two.settings
    assert (
        one.settings["learned"]["calibration_kl"]
        != (other.settings["learned"]["calibration_kl"])
    )
    assert one.settings["estimator"] == "fisher"
    assert one.settings["table"] == table.metadata["spec_hash"]
    learned = one.settings["learned"]
    assert learned["calibration"] == WINDOWS.fingerprint
    assert {name: learned[name] for name in ("n_steps", "batch_size", "seed")} == {
        name: options[name] for name in ("n_steps", "batch_size", "seed")
    }


def test_the_model_is_left_alone(model: nn.Module) -> None:
    """Weights, their flags and gradients, modes and the implementation stay."""
    model.model.layers[0].train()
    model.lm_head.weight.requires_grad_(False)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    table = collect_statistics(model, WINDOWS)
    learn_mask(model, table, WINDOWS, ratio=0.5, n_steps=4)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert parameter.requires_grad == flags[name]
        assert parameter.grad is None
    assert [module.training for module in model.modules()] == modes
    assert model.config._experts_implementation == "eager"


def test_learning_finds_what_is_irrelevant(model: nn.Module) -> None:
    """Atoms without W_down go, though the score ranks those first that matter most.

    A quarter of the atoms write nothing, so to remove exactly them costs nothing. The
    score puts all others in reverse, and them above the quarter that really is best.
    """
    for layer in find_experts(model):
        for expert in range(layer.n_experts):
            matrices(layer.module, expert)["W_down"].data[:, ::4] = 0
    irrelevant = np.arange(64) % 4 == 0
    table = collect_statistics(model, WINDOWS)
    scores = np.empty(64)
    scores[np.argsort(-table.score("fisher").to_numpy())] = np.arange(64)
    scores[irrelevant] = 15.5
    frame = table.frame.assign(sum_hg2=scores, tokens=1)
    misled = ImportanceTable.from_frame(frame, **table.metadata)
    start = select(misled, ratio=0.25, estimator="fisher")
    assert removed(start)[irrelevant].sum() == 0
    keep = learn_mask(model, misled, WINDOWS, ratio=0.25, n_steps=80)
    assert removed(keep).tolist() == irrelevant.tolist()
    assert kl_of(model, keep) < ROUNDING < kl_of(model, start)


def test_the_better_of_start_and_end_is_returned(model: nn.Module) -> None:
    """Both losses are on record; a step that ruins the ranks gives back the start."""
    table = collect_statistics(model, WINDOWS)
    start = select(table, ratio=0.5, estimator="fisher")
    for options in ({"n_steps": 30}, {"n_steps": 1, "learning_rate": 1e3}):
        keep = learn_mask(model, table, WINDOWS, ratio=0.5, **options)
        kl = keep.settings["learned"]["calibration_kl"]
        assert kl["start"] == pytest.approx(kl_of(model, start), rel=1e-10)
        assert kl_of(model, keep) == pytest.approx(min(kl.values()), rel=1e-10)
        assert (keep == start) == (kl["start"] <= kl["learned"])
    assert keep == start


def test_progress_counts_steps(model: nn.Module) -> None:
    """It is called after each step."""
    seen: list[tuple[int, int]] = []
    table = collect_statistics(model, WINDOWS)
    options = {"ratio": 0.5, "n_steps": 3, "batch_size": 5}
    learn_mask(
        model, table, WINDOWS, progress=lambda *done: seen.append(done), **options
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


# --- what is refused --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"estimator": "camera"}, "ranks atoms within a layer"),
        ({"ratio": 0.01}, "0.01 of 64 atoms removes none"),
        ({"n_steps": 0}, "n_steps must be positive, got 0"),
        ({"batch_size": -1}, "batch_size must be positive, got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0"),
    ],
)
def test_what_cannot_be_learned_is_refused(
    model: nn.Module, options: dict[str, object], text: str
) -> None:
    """The message says what was given and what is possible."""
    table = collect_statistics(model, WINDOWS)
    with pytest.raises(SpecError, match=text):
        learn_mask(model, table, WINDOWS, **({"ratio": 0.5} | options))


def test_a_table_of_another_model_is_refused(model: nn.Module) -> None:
    """Its layers have other shapes."""
    table = collect_statistics(tiny_model("qwen2_moe", num_experts=3), WINDOWS)
    with pytest.raises(SpecError, match=r"the table .* made for another model"):
        learn_mask(model, table, WINDOWS, ratio=0.5)
