"""The gradients of experts' weights against autograd through the family's own code."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from families import tiny_model
from methods_by_hand import FAMILIES, IDS, WINDOWS, gradients_by_hand

from heapr_lab.errors import HeaprLabError
from heapr_lab.methods.gradients import WeightGradients, visit_gradients
from heapr_lab.models.experts import find_experts

pytestmark = pytest.mark.oracle

CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
"""Some families compute a part in float32; gradients are larger than 1e-4."""


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss", "nemotron_h"])
def test_gradients_are_those_of_autograd(family: str) -> None:
    """Gradients of each window and layer, oriented as `up_rows` and `down`."""
    model, seen = tiny_model(family), defaultdict(list)

    def note(grads: WeightGradients) -> None:
        seen[grads.layer.layer].append((grads.up_rows.clone(), grads.down.clone()))
        assert all(parameter.grad is None for parameter in model.parameters())

    visit_gradients(model, WINDOWS, note)
    layers = {layer.layer: layer for layer in find_experts(model)}
    for number, expected in enumerate(gradients_by_hand(model)):
        for (layer, expert), w in expected.items():
            up, down = seen[layer][number]
            gradients = layers[layer].apart(up[expert]) | {"down": down[expert]}
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, w[f"W_{name}"], **CLOSE)
        assert max(float(w["W_up"].abs().max()) for w in expected.values()) > 1e-4


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
    assert progress == [(done, len(IDS)) for done in range(1, len(IDS) + 1)]
