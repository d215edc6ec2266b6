"""The gradients of experts' weights against autograd through the family's own code."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import tiny_ids, tiny_model
from torch import nn

from heapr_lab.errors import HeaprLabError
from heapr_lab.methods.gradients import WeightGradients, visit_gradients
from heapr_lab.models.experts import find_experts
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

FAMILIES = (
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "gpt_oss",
    "nemotron_h",
)
"""The last two: transposed and interleaved with biases, and without a gate."""
WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=3, seq_len=10))
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
"""Some families compute a part in float32; gradients are larger than 1e-4."""
Found = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


def visited(model: nn.Module, windows: CalibrationSet = WINDOWS) -> Found:
    """Copies of the gradients by (window, layer)."""
    found: Found = {}
    seen: list[int] = []

    def keep(own: WeightGradients) -> None:
        number = seen.count(own.layer.layer)
        seen.append(own.layer.layer)
        found[number, own.layer.layer] = own.up_rows.clone(), own.down.clone()
        assert all(parameter.grad is None for parameter in model.parameters())

    visit_gradients(model, windows, keep)
    return found


def by_autograd(model: nn.Module) -> Found:
    """The same, from a copy's own eager experts and transformers' logits."""
    twin, found = copy.deepcopy(model).requires_grad_(True), {}
    for number, ids in enumerate(WINDOWS.ids):
        twin.zero_grad()
        logits = twin(ids[None]).logits[0, :-1]
        F.cross_entropy(logits, ids[1:], reduction="sum").backward()
        for layer in find_experts(twin):
            up = getattr(layer.module, "gate_up_proj" if layer.gated else "up_proj")
            own = up.grad, layer.module.down_proj.grad
            if layer.module.is_transposed:
                own = own[0].transpose(1, 2), own[1].transpose(1, 2)
            found[number, layer.layer] = own[0].clone(), own[1].clone()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_autograd(family: str) -> None:
    """Of each window and layer, in the orientation of `up_rows` and `down`."""
    model = tiny_model(family)
    found, expected = visited(model), by_autograd(model)
    assert found.keys() == expected.keys()
    for key, own in found.items():
        for gradient, twin in zip(own, expected[key], strict=True):
            assert twin.abs().max() > 1e-4
            torch.testing.assert_close(gradient, twin, **CLOSE)
    for layer in find_experts(model):
        up, down = found[0, layer.layer]
        assert (up.shape, down.shape) == (layer.up_rows.shape, layer.down.shape)


def test_a_window_has_the_same_gradients_wherever_it_is() -> None:
    """To the last bit, also alone."""
    model = tiny_model("mixtral")
    found = visited(model)
    turned = visited(model, CalibrationSet.from_ids(WINDOWS.ids.flip(0)))
    for (number, layer), own in found.items():
        other = turned[2 - number, layer]
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


def test_the_model_is_as_before() -> None:
    """Modes, flags and gradients, after a pass and after an exception in one."""
    model = tiny_model("qwen2_moe").train()
    own = find_experts(model)[0].module.down_proj
    own.grad = torch.full_like(own, 3.0)
    next(model.parameters()).requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]

    def fail(_own: WeightGradients) -> None:
        assert not model.training
        raise KeyError

    with pytest.raises(KeyError):
        visit_gradients(model, WINDOWS, fail)
    visit_gradients(model, WINDOWS, lambda _own: None)
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert torch.equal(own.grad, torch.full_like(own, 3.0))
    others = [p.grad for p in model.parameters() if p is not own]
    assert others == [None] * len(others)


def test_gradients_that_are_not_finite_are_refused() -> None:
    """By the number of the layer."""
    model = tiny_model("mixtral")

    def spoil(own: WeightGradients) -> None:
        own.down[0, 0, 0] = torch.inf

    with pytest.raises(HeaprLabError, match="non-finite gradients in layer 1"):
        visit_gradients(model, WINDOWS, spoil)
    progress: list[tuple[int, int]] = []
    visit_gradients(
        model, WINDOWS, lambda _own: None, progress=lambda *done: progress.append(done)
    )
    assert progress == [(1, 3), (2, 3), (3, 3)]
