"""Composed experts against matrices multiplied out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of
from torch import nn

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.methods.composed_experts import (
    Composition,
    Projection,
    Shared,
)
from heapr_lab.methods.composing import composing, composition_of, dense_composition
from heapr_lab.methods.compression import ExpertComposition, Made
from heapr_lab.models.experts import ExpertsLayer, describe, find_experts

pytestmark = pytest.mark.oracle

FAMILIES = ("qwen2_moe", "mixtral", "deepseek_v2", "gpt_oss", "qwen3_moe")
IDS = tiny_ids(seed=3)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SIX = {"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6}


def merged(layer: ExpertsLayer) -> Composition:
    """Experts 0 and 1 share the matrices of 2; the others have their own."""
    experts = [layer.expert(e) for e in range(2, layer.n_experts)]
    return dense_composition([experts[0], experts[0], *experts])


def factored(layer: ExpertsLayer) -> Composition:
    """A common base, the mean, with a difference of rank 2 for each expert."""
    experts = [layer.expert(e) for e in range(layer.n_experts)]

    def projection(name: str) -> Projection:
        stack = torch.stack([expert[name] for expert in experts])
        base = stack.mean(0)
        u, s, v = torch.linalg.svd(stack - base, full_matrices=False)
        left, right = u[..., :2] * s[:, None, :2], v[:, :2]
        key = f"{name}_bias"
        bias = Shared.own([expert[key] for expert in experts if key in expert])
        every = (0,) * len(experts)
        return Projection(
            Shared((base,), every), Shared.own([*left]), Shared.own([*right]), bias
        )

    gate = projection("gate") if layer.gated else None
    return Composition(projection("up"), projection("down"), gate)


KINDS: dict[str, Callable[[ExpertsLayer], Composition]] = {
    "merged": merged,
    "factored": factored,
}


def by_hand(model: nn.Module, experts: dict[int, Composition]) -> nn.Module:
    """The same model with its stock modules, whose matrices are multiplied out.

    A constant expert is one whose matrices are 0; its value is its output bias.
    """
    import copy

    twin = copy.deepcopy(model)
    for layer in find_experts(twin):
        for expert in range(layer.n_experts):
            for name, target in layer.expert(expert).items():
                composed = experts[layer.layer].projections[name.removesuffix("_bias")]
                target.copy_(multiplied(composed, expert, name, target))
    return twin


def multiplied(
    projection: Projection, expert: int, name: str, like: torch.Tensor
) -> torch.Tensor:
    """One matrix or bias of an expert."""

    def part(shared: Shared) -> torch.Tensor | None:
        if not shared.of or shared.of[expert] < 0:
            return None
        return shared.tensors[shared.of[expert]]

    if name.endswith("_bias"):
        bias = part(projection.bias)
        return torch.zeros_like(like) if bias is None else bias
    total = torch.zeros_like(like)
    if part(projection.dense) is not None:
        total = total + part(projection.dense)
    if part(projection.left) is not None:
        total = total + part(projection.left) @ part(projection.right)
    return total


def made_of(model: nn.Module, kind: str) -> dict[int, Composition]:
    """The experts of every layer."""
    return {layer.layer: KINDS[kind](layer) for layer in find_experts(model)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["merged", "factored"])
def test_composed_is_multiplied_out(kind: str, family: str) -> None:
    """Applied and materialised; counted on the tensors of the copy."""
    model = tiny_model(family, **SIX)
    experts = made_of(model, kind)
    expected = logits_of(by_hand(model, experts), IDS)
    dense = logits_of(model, IDS)
    assert (expected - dense).abs().max() > 1e-3
    compressed = compression(model, experts)
    with compressed.apply(model):
        torch.testing.assert_close(logits_of(model, IDS), expected, **CLOSE)
    assert torch.equal(logits_of(model, IDS), dense)
    small = compressed.materialise(model)
    torch.testing.assert_close(logits_of(small, IDS), expected, **CLOSE)
    stored = sum(weight.numel() for weight in small.parameters())
    assert compressed.savings(model).parameters[1] == stored


def compression(model: nn.Module, experts: Any, kept: Any = None) -> ExpertComposition:
    """A compression of the compositions."""
    shapes = describe(model).layers
    return ExpertComposition(Made("test", 0.5, 0, {}), experts, shapes, kept)


def test_what_does_not_fit_is_refused() -> None:
    """Numbers of experts, projections and layers, and a model that has such experts."""
    model = tiny_model("qwen3_moe")
    layer = find_experts(model)[0]
    stock = composition_of(layer)
    few = dense_composition([layer.expert(0)])
    ungated = Composition(stock.up, stock.down)
    for made, why in (
        ({0: few}, r"layer 0 has new experts for \[1\] .*expected 4 experts"),
        ({0: ungated}, r"the projections down, up; expected .* down, gate, up"),
        ({7: stock}, "another model"),
    ):
        with pytest.raises(SpecError, match=why), composing(model, made):
            pass
    small = compression(model, {0: merged(layer)}).materialise(model)
    with pytest.raises(LayoutError, match="already compressed"):
        find_experts(small)


def test_counts_by_hand() -> None:
    """Parameters and operations of a base with factors, a shared matrix once."""
    base, every = Shared((torch.ones(3, 4),), (0, 0)), Shared
    left, right = every.own([torch.ones(3, 1)] * 2), every.own([torch.ones(1, 4)] * 2)
    up = Projection(base, left, right)
    down = Projection(Shared((torch.ones(4, 3),), (0, -1)))
    composition = Composition(up, down)
    assert composition.n_parameters == 12 + 2 * 3 + 2 * 4 + 12
    assert composition.flops_of(0) == 2 * (12 + 3 + 4 + 12)
    assert composition.flops_of(1) == 2 * (12 + 3 + 4)
