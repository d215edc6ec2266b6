"""Healing: experts, routers and norms learn from text and from the dense model."""

import re

import pytest
import torch
import torch.nn.functional as F
from devices import GPU
from families import REPRESENTATIVES, tiny_ids, tiny_model
from heard import Heard, stop_at
from keeps import random_keep, weights_of
from torch import nn

from heapr_lab import CalibrationSet, evaluate_perplexity, heal, masking, prune
from heapr_lab.errors import CacheError, HeaprLabError, SpecError
from heapr_lab.models.experts import sliced_experts
from heapr_lab.models.likelihood import final_states
from heapr_lab.refinement import healing

TEXT = CalibrationSet.from_ids(torch.arange(32 * 9).reshape(32, 9) % 48)
"""Each token is the one before it plus one, which can be learnt."""


@pytest.fixture
def dense() -> nn.Module:
    """A tiny qwen2_moe in float32."""
    return tiny_model("qwen2_moe", dtype=torch.float32)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch) -> None:
    """Two windows a step."""
    monkeypatch.setattr(healing, "BATCH_TOKENS", 18)


def pruned_of(dense: nn.Module) -> nn.Module:
    """Half of the atoms are gone: one expert is empty, one whole."""
    return prune(dense, random_keep(dense))


def assert_same(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """The weights of the model are these, bit for bit."""
    torch.testing.assert_close(weights_of(model), weights, rtol=0, atol=0)


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_gradients_are_those_of_whole_logits(family):
    """The gradients of -log q and KL(p ‖ q) in one expression, in float64."""
    dense = tiny_model(family)
    pruned, ids = pruned_of(dense), tiny_ids()
    states, goal = final_states(pruned, ids), final_states(dense, ids)
    loss, gradient = healing.loss_and_gradient(
        pruned, dense, ids, states, goal.detach(), ids[:, 1:].numel()
    )
    states.backward(gradient)
    names = [name for name, p in pruned.named_parameters() if p.grad is not None]
    gradients = {name: pruned.get_parameter(name).grad.clone() for name in names}
    pruned.zero_grad()
    log_q, log_p = (
        model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        for model in (pruned, dense)
    )
    nll = F.nll_loss(log_q.flatten(0, 1), ids[:, 1:].flatten())
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    (nll + kl).backward()
    rounding = torch.finfo(log_q.dtype).eps  # the logits of nemotron_h are float32
    assert loss == pytest.approx((nll + kl).item(), rel=max(1e-9, rounding))
    assert any("experts" in name for name in names)
    for name in names:
        expected = pruned.get_parameter(name).grad
        torch.testing.assert_close(gradients[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "family",
    ["qwen2_moe", "nemotron_h", "gemma4_text", "hunyuan_v1_moe", "inkling_text"],
)
def test_experts_routers_and_norms_learn(family):
    """The held-out loss falls; all else of both models is untouched.

    So are attention, dense and shared parts, and all that is in the embeddings.
    """
    dense = tiny_model(family, dtype=torch.float32)
    pruned = pruned_of(dense)
    before, teacher = weights_of(pruned), weights_of(dense)
    held_out = TEXT.ids[:8]
    losses = [evaluate_perplexity(pruned, held_out).nll]
    assert heal(pruned, dense, TEXT, learning_rate=1e-2) is pruned
    losses.append(evaluate_perplexity(pruned, held_out).nll)
    report = pruned.heapr_healing
    assert report["held_out"].iloc[0] == pytest.approx(losses[0], rel=1e-5)
    assert report["held_out"].min() == pytest.approx(losses[1], rel=1e-5)
    assert losses[1] < losses[0]
    assert report["tokens"].tolist() == [0, 54, 108, 162, 216]
    of_experts = tuple(f"{name}." for name in sliced_experts(pruned))
    for name, weight in pruned.named_parameters():
        may = name.startswith(of_experts) or ("norm" in name and "embed" not in name)
        may |= bool(re.search(r"\.(gate|router|shared_expert_gate)\.", name))
        assert torch.equal(weight, before[name]) != (may and weight.numel() > 0), name
        assert weight.grad is None
        assert weight.requires_grad
    for name, weight in dense.named_parameters():
        assert torch.equal(weight, teacher[name])
        assert weight.grad is None
    assert "then healed on 216 tokens of token ids" in pruned.heapr_weights


@pytest.mark.parametrize("family", ["qwen2_moe", "glm_moe_dsa"])
def test_an_interrupted_one_resumes(family, tmp_path, monkeypatch):
    """It has the weights and report of one that was not interrupted, to the bit.

    The norm of an indexer has no gradient. One that ended has no further step.
    """
    dense = tiny_model(family, dtype=torch.float32)
    whole, halves = pruned_of(dense), pruned_of(dense)
    heal(whole, dense, TEXT, learning_rate=1e-2)
    monkeypatch.setattr(healing, "_SAVE_SECONDS", -1.0)
    state = tmp_path / "state.safetensors"
    options = {"learning_rate": 1e-2, "state": state}
    with pytest.raises(KeyboardInterrupt):
        heal(halves, dense, TEXT, progress=stop_at(8), **options)
    seen = Heard()
    again = pruned_of(dense)
    heal(again, dense, TEXT, progress=seen, **options)
    assert seen == [(step, 12) for step in range(9, 13)]
    assert again.heapr_healing.equals(whole.heapr_healing)
    assert_same(again, weights_of(whole))
    third = pruned_of(dense)
    heal(third, dense, TEXT, progress=seen, **options)
    assert len(seen) == 4
    assert third.heapr_healing.equals(whole.heapr_healing)
    assert_same(third, weights_of(whole))
    healing.forget(state)
    assert not state.exists()


@pytest.mark.gpu
def test_a_state_is_restored_where_the_weights_are(tmp_path):
    """The second step of Adam is the same after a restart."""
    weights = [nn.Parameter(torch.ones(3).to(GPU)) for _ in range(2)]
    whole, again = (torch.optim.AdamW([weight]) for weight in weights)
    state = tmp_path / "state.safetensors"
    for weight in weights:
        weight.grad = torch.arange(3.0).to(GPU)
    whole.step()
    healing.save_training(state, {"w": weights[0]}, whole, {})
    healing.restore_training(state, {"w": weights[1]}, again)
    whole.step()
    again.step()
    torch.testing.assert_close(weights[1].cpu(), weights[0].cpu(), rtol=0, atol=0)


def test_another_or_a_damaged_state_is_refused(dense, tmp_path, monkeypatch):
    """It is named, and stays."""
    monkeypatch.setattr(healing, "_SAVE_SECONDS", -1.0)
    state = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        heal(pruned_of(dense), dense, TEXT, state=state, progress=stop_at(2))
    with pytest.raises(CacheError, match="of another training"):
        heal(pruned_of(dense), dense, TEXT, state=state, learning_rate=1e-3)
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(CacheError, match="truncated"):
        heal(pruned_of(dense), dense, TEXT, state=state)
    assert state.exists()


def test_a_loss_that_is_not_finite_is_an_error(dense):
    """The error says what to do."""
    pruned = pruned_of(dense)
    with pytest.raises(HeaprLabError, match=r"smaller learning_rate|not finite"):
        heal(pruned, dense, TEXT, learning_rate=1e30)


def test_a_training_that_does_not_fit_is_refused(dense, monkeypatch):
    """What is kept of every trained weight is counted before anything is trained."""
    pruned = pruned_of(dense)
    monkeypatch.setattr(healing, "free_memory", lambda _device: 1000)
    with pytest.raises(SpecError, match=r"weight need .* GB are free: .* \(--stream\)"):
        heal(pruned, dense, TEXT)


def test_what_cannot_be_healed_is_refused(dense):
    """Another model, one not sliced, 16 bits, a mask, too little text."""
    pruned = pruned_of(dense)
    with pytest.raises(SpecError, match="has 0 layers of sliced experts"):
        heal(dense, dense, TEXT)
    with pytest.raises(SpecError, match="expected those of the dense"):
        heal(pruned, tiny_model("deepseek_v2"), TEXT)
    low = tiny_model("qwen2_moe", dtype=torch.bfloat16)
    with pytest.raises(SpecError, match="to heal, load the dense model with dtype"):
        heal(pruned_of(low), low, TEXT)
    with (
        masking(dense, random_keep(dense)),
        pytest.raises(SpecError, match="begin again"),
    ):
        heal(pruned, dense, TEXT)
    with pytest.raises(SpecError, match="there are 3 windows"):
        heal(pruned, dense, CalibrationSet.from_ids(TEXT.ids[:3]))
    with pytest.raises(SpecError, match="must be positive, got 0"):
        heal(pruned, dense, TEXT, learning_rate=0)
