"""Steps of W_down: against whole logits, streamed, and how many windows they take."""

import copy

import pytest
import torch
from families import REPRESENTATIVES, tiny_model, tiny_windows
from keeps import logits_of, masked_logits, random_keep
from oracles.streamed import ROUNDED, written
from tiny_folder import opened
from torch import nn

from heapr_lab import CalibrationSet, KeepMask
from heapr_lab.models.experts import find_experts
from heapr_lab.refinement import descent
from heapr_lab.refinement.compensation import fit_compensation

WINDOWS = tiny_windows(n_sequences=6, seq_len=12)


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch) -> None:
    monkeypatch.setattr(descent, "FEWEST_TOKENS", 0)


def downs_of(model: nn.Module) -> dict[int, torch.Tensor]:
    """A copy of W_down of each layer."""
    return {e.layer: e.down.detach().clone() for e in find_experts(model)}


def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ q) of all tokens but the last of each window."""
    log_p, log_q = (logits[:, :-1].log_softmax(-1) for logits in (log_p, log_q))
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def by_hand(
    dense: nn.Module, keep: KeepMask, downs: dict[int, torch.Tensor]
) -> list[torch.Tensor]:
    """The new W_down of each layer, by gradients of a copy of the model."""
    twin = copy.deepcopy(dense)
    layers = find_experts(twin)
    new = [nn.Parameter(downs[layer.layer].clone()) for layer in layers]
    optimizers = [
        torch.optim.Adafactor([down], lr=1.0, eps=(None, 0.0)) for down in new
    ]
    rate = 0.0
    for step in range(4):
        ids = WINDOWS.ids[step::4]
        for layer, down in zip(layers, new, strict=True):
            layer.oriented(layer.module.down_proj.data).copy_(down.detach())
        twin.zero_grad()
        apart = kl(logits_of(dense, ids), twin(ids, use_cache=False).logits)
        apart.backward()
        rate = rate or descent.RATE * min(1.0, apart.item() / descent.AT_MOST_FROM)
        for layer, down, optimizer in zip(layers, new, optimizers, strict=True):
            kept = torch.from_numpy(keep.by_layer(layer.layer).copy())[:, None]
            down.grad = layer.oriented(layer.module.down_proj.grad) * kept
            optimizer.param_groups[0]["lr"] = rate * (1 - step / 4)
            optimizer.step()
    return new


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_steps_are_those_of_whole_logits(family):
    """In float64; atoms that are removed stay 0, and predictions come nearer."""
    model = tiny_model(family)
    keep = random_keep(model)
    before = fit_compensation(model, keep, WINDOWS).down_projs
    after = descent.descended(model, keep, before, WINDOWS)
    expected = by_hand(model, keep, dict(before))
    near = 1e-7 if family in ROUNDED else 1e-9  # of steps of 1e-4
    for number, down in zip(after, expected, strict=True):
        torch.testing.assert_close(after[number], down.detach(), rtol=1e-6, atol=near)
        gone = ~torch.from_numpy(keep.by_layer(number).copy())
        assert not after[number].mT[gone].any()
    dense = logits_of(model, WINDOWS.ids)
    apart = [
        kl(dense, masked_logits(model, WINDOWS.ids, keep, downs)).item()
        for downs in (before, after)
    ]
    assert apart[1] < apart[0]
    assert not any(w.grad is not None for w in model.parameters())


@pytest.mark.parametrize("room", [0, "1GB"])
def test_a_streamed_model_takes_the_same_steps(room, tmp_path):
    """A layer at a time, whose new weights and gradients are in files."""
    folder = written(tmp_path, "qwen3_moe", num_hidden_layers=3)
    streamed = opened(folder, stream=True, host_memory=room)
    models = [opened(folder, stream=False), streamed]
    keep = random_keep(models[0])
    before = downs_of(models[0])
    one, other = (descent.descended(m, keep, before, WINDOWS) for m in models)
    for number, down in one.items():
        torch.testing.assert_close(other[number], down, rtol=1e-9, atol=1e-12)
        assert not torch.equal(down, before[number])


def test_weights_keep_their_type():
    """Steps are taken in float32, whatever the model has."""
    model = tiny_model("qwen2_moe", dtype=torch.bfloat16)
    before = downs_of(model)
    after = descent.descended(model, random_keep(model), before, WINDOWS)
    assert {down.dtype for down in after.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("n", "length", "taken"), [(63, 512, 0), (64, 512, 32), (96, 2048, 8), (9, 8192, 4)]
)
def test_how_many_windows_are_used(n, length, taken, monkeypatch):
    """None of a short text, and not all of a long one, but one for each step."""
    monkeypatch.undo()
    windows = CalibrationSet.from_ids(torch.zeros(n, length, dtype=torch.long))
    assert descent.n_windows(windows) == taken


@pytest.mark.parametrize("scale", [3e-4, 3e-6])
def test_steps_are_relative_to_the_weights(scale):
    """The same function by smaller W_down and larger W_up takes the same steps."""
    model, smaller = tiny_model("qwen2_moe"), tiny_model("qwen2_moe")
    for layer in find_experts(smaller):
        layer.module.down_proj.data *= scale
        layer.module.gate_up_proj.data[:, layer.d_inter :] /= scale
    keep = random_keep(model)
    afters = []
    for each in (model, smaller):
        afters.append(descent.descended(each, keep, downs_of(each), WINDOWS))
    for number, down in afters[0].items():
        again = afters[1][number] / scale
        torch.testing.assert_close(again, down, rtol=1e-4, atol=1e-6)


def test_what_overflows_takes_no_step():
    """In float16, where a gradient of small weights is larger than 65,504."""
    model = tiny_model("qwen2_moe", dtype=torch.float32)
    for layer in find_experts(model)[:1]:
        layer.module.down_proj.data *= 1e-4
        layer.module.gate_up_proj.data[:, layer.d_inter :] /= 1e-4
    model = model.half()
    before = downs_of(model)
    after = descent.descended(model, random_keep(model), before, WINDOWS)
    moved = [not torch.equal(after[n], before[n]) for n in before]
    assert moved == [False, True]
    assert all(down.isfinite().all() for down in after.values())


def test_they_are_taken_in_inference_mode():
    """As all else of `compress`."""
    model = tiny_model("qwen2_moe")
    keep = random_keep(model)
    afters = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            afters.append(descent.descended(model, keep, downs_of(model), WINDOWS))
    assert all(torch.equal(afters[0][n], afters[1][n]) for n in afters[0])
