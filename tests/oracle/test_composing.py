"""Composed experts against matrices multiplied out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of
from methods_by_hand import reloaded
from torch import nn

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.methods.composed_experts import (
    ComposedExperts,
    Composition,
    Projection,
    Shared,
    flops_of,
    n_parameters,
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
    return dense_composition(experts, of=(0, 0, *range(layer.n_experts - 2)))


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


def constant(layer: ExpertsLayer) -> Composition:
    """Expert 0 is a constant vector, the others are unchanged."""
    stock = composition_of(layer)
    value = torch.linspace(-1, 1, layer.d_expert, dtype=layer.dtype)

    def without_first(part: Shared) -> Shared:
        return Shared(part.tensors[1:], (-1, *range(len(part.of) - 1)))

    def projection(p: Projection, bias: Shared) -> Projection:
        return Projection(dense=without_first(p.dense), bias=bias)

    def shortened(p: Projection) -> Shared:
        return without_first(p.bias) if p.bias.of else Shared()

    biases = (value, *stock.down.bias.tensors[1:])
    places = (
        tuple(range(layer.n_experts))
        if layer.biased
        else (0,) + (-1,) * (layer.n_experts - 1)
    )
    gate = None if stock.gate is None else projection(stock.gate, shortened(stock.gate))
    down = projection(stock.down, Shared(biases, places))
    return Composition(projection(stock.up, shortened(stock.up)), down, gate)


KINDS: dict[str, Callable[[ExpertsLayer], Composition]] = {
    "merged": merged,
    "factored": factored,
    "constant": constant,
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


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "nemotron_h"])
def test_a_constant_expert(family: str) -> None:
    """It adds p times its vector, also in families without biases."""
    model = tiny_model(family)
    experts = made_of(model, "constant")
    layer = find_experts(model)[0]
    value = torch.linspace(-1, 1, layer.d_expert, dtype=torch.float64)
    with composing(model, experts):
        module = model.get_submodule(layer.name)
        x = torch.randn(5, layer.d_expert, dtype=torch.float64)
        index = torch.zeros(5, 1, dtype=torch.long)
        out = module(x, index, torch.full((5, 1), 0.25, dtype=torch.float64))
    torch.testing.assert_close(out, (0.25 * value).expand(5, -1), **CLOSE)


def test_stock_shapes_are_an_ordinary_checkpoint(tmp_path: Path) -> None:
    """Other weights of the same shapes: no composed module, no quantization entry."""
    for family in ("gpt_oss", "mixtral", "qwen2_moe"):
        model = tiny_model(family)
        layers = find_experts(model)
        order = [1, 0, 3, 2]
        experts = {
            layer.layer: dense_composition([layer.expert(e) for e in order])
            for layer in layers
        }
        compressed = compression(model, experts)
        small = compressed.materialise(model)
        assert not any(isinstance(m, ComposedExperts) for m in small.modules())
        expected = logits_of(by_hand(model, experts), IDS)
        torch.testing.assert_close(logits_of(small, IDS), expected, **CLOSE)
        folder = compressed.save(model, tmp_path / family, base="")
        assert "quantization_config" not in (folder / "config.json").read_text()
        torch.testing.assert_close(logits_of(reloaded(folder), IDS), expected, **CLOSE)
        assert compressed.achieved_ratio == 0.0


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "deepseek_v2", "glm4_moe"])
@pytest.mark.parametrize("composed", [False, True])
def test_layers_that_keep_different_numbers(family: str, composed: bool) -> None:
    """Applied and copied with their router rows, with and without other experts."""
    model = tiny_model(family, **SIX)
    layers = find_experts(model)
    kept = {layer.layer: tuple(range(3 + i % 2, 6)) for i, layer in enumerate(layers)}
    kept[layers[0].layer] = (0, 2, 3, 5)
    experts = {}
    if composed:
        experts = {
            layer.layer: dense_composition(
                [layer.expert(kept[layer.layer][0])], of=(0,) * len(kept[layer.layer])
            )
            for layer in layers
        }
    compressed = compression(model, experts, kept)
    with compressed.apply(model):
        expected = logits_of(model, IDS)
    small = compressed.materialise(model)
    torch.testing.assert_close(logits_of(small, IDS), expected, **CLOSE)
    after = sum(weight.numel() for weight in small.parameters())
    assert compressed.savings(model).parameters == (describe(model).n_parameters, after)


def test_what_does_not_fit_is_refused() -> None:
    """Numbers of experts, projections and layers, and a model that has such experts."""
    model = tiny_model("qwen3_moe")
    layer = find_experts(model)[0]
    stock = composition_of(layer)
    few = dense_composition([layer.expert(0)], of=(0,))
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
    plan = Composition(up, down).plan
    assert n_parameters(plan) == 12 + 2 * 3 + 2 * 4 + 12
    assert flops_of(plan, 0) == 2 * (12 + 3 + 4 + 12)
    assert flops_of(plan, 1) == 2 * (12 + 3 + 4)
