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
Gradients = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


def visited(model: nn.Module, windows: CalibrationSet = WINDOWS) -> Gradients:
    """Copies of the gradients by (window, layer)."""
    copies: Gradients = {}
    seen: list[int] = []

    def keep(grads: WeightGradients) -> None:
        number = seen.count(grads.layer.layer)
        seen.append(grads.layer.layer)
        copies[number, grads.layer.layer] = grads.up_rows.clone(), grads.down.clone()
        assert all(parameter.grad is None for parameter in model.parameters())

    visit_gradients(model, windows, keep)
    return copies


def by_autograd(model: nn.Module) -> Gradients:
    """The same, from a copy's own eager experts and transformers' logits."""
    twin, copies = copy.deepcopy(model).requires_grad_(True), {}
    for number, ids in enumerate(WINDOWS.ids):
        twin.zero_grad()
        logits = twin(ids[None]).logits[0, :-1]
        F.cross_entropy(logits, ids[1:], reduction="sum").backward()
        for layer in find_experts(twin):
            up = getattr(layer.module, "gate_up_proj" if layer.gated else "up_proj")
            grads = up.grad, layer.module.down_proj.grad
            if layer.module.is_transposed:
                grads = grads[0].transpose(1, 2), grads[1].transpose(1, 2)
            copies[number, layer.layer] = grads[0].clone(), grads[1].clone()
    return copies


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_autograd(family: str) -> None:
    """Gradients of each window and layer, oriented as `up_rows` and `down`."""
    model = tiny_model(family)
    gradients, expected = visited(model), by_autograd(model)
    assert gradients.keys() == expected.keys()
    for key, pair in gradients.items():
        for gradient, twin in zip(pair, expected[key], strict=True):
            assert twin.abs().max() > 1e-4
            torch.testing.assert_close(gradient, twin, **CLOSE)
    for layer in find_experts(model):
        up, down = gradients[0, layer.layer]
        assert (up.shape, down.shape) == (layer.up_rows.shape, layer.down.shape)


def test_a_window_has_the_same_gradients_wherever_it_is() -> None:
    """They are the same to the last bit, also alone."""
    model = tiny_model("mixtral")
    gradients = visited(model)
    turned = visited(model, CalibrationSet.from_ids(WINDOWS.ids.flip(0)))
    for (number, layer), pair in gradients.items():
        other = turned[2 - number, layer]
        assert all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))


def test_the_model_is_as_before() -> None:
    """Modes, flags and gradients, after a pass and after an exception in one."""
    model = tiny_model("qwen2_moe").train()
    weight = find_experts(model)[0].module.down_proj
    weight.grad = torch.full_like(weight, 3.0)
    next(model.parameters()).requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]

    def fail(_grads: WeightGradients) -> None:
        assert not model.training
        raise KeyError

    with pytest.raises(KeyError):
        visit_gradients(model, WINDOWS, fail)
    visit_gradients(model, WINDOWS, lambda _: None)
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    rest = [p.grad for p in model.parameters() if p is not weight]
    assert rest == [None] * len(rest)


def test_gradients_that_are_not_finite_are_refused() -> None:
    """The layer is named by its number."""
    model = tiny_model("mixtral")

    def spoil(grads: WeightGradients) -> None:
        grads.down[0, 0, 0] = torch.inf

    with pytest.raises(HeaprLabError, match="non-finite gradients in layer 1"):
        visit_gradients(model, WINDOWS, spoil)
    progress: list[tuple[int, int]] = []
    visit_gradients(
        model, WINDOWS, lambda _: None, progress=lambda *done: progress.append(done)
    )
    assert progress == [(1, 3), (2, 3), (3, 3)]
