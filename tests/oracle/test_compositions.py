"""Experts that are left out, shared or factored, against the same by hand."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from families import REPRESENTATIVES, tiny_ids, tiny_model
from keeps import logits_of, weights_of
from methods_by_hand import CLOSE, SIX, multiplied, reloaded, replaced
from torch import nn

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.methods.composing import (
    Composition,
    composing,
    dense_experts,
    flops_of,
)
from heapr_lab.methods.compression import ExpertComposition, Made
from heapr_lab.methods.expert_axes import dropping, find_expert_axes
from heapr_lab.models.experts import ExpertsLayer, describe, find_experts

IDS = tiny_ids()
EXACT = {"rtol": 1e-12, "atol": 1e-12}
IN_SINGLE = {"rtol": 1e-6, "atol": 1e-6}
"""The routers of most families compute in float32."""
NOT_DROPPABLE = {
    "ernie4_5_moe": r"moe_statics.e_score_correction_bias has the shape \(1, 4\)",
    "inkling_text": r"has 0 router weights with one row for each of its 4 experts",
    "deepseek_v4": r"gate.tid2eid is a table of torch.int\d+, shape \(48, 2\)",
}
"""Corrections on another axis, shared experts in the router, a table of experts."""
REFERENCES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss")


def kept_of(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Other experts in each layer, three of four."""
    layers = [layer.layer for layer in find_experts(model)]
    return {k: ((0, 2, 3), (0, 1, 3), (1, 2, 3))[k % 3] for k in layers}


def composed(
    model: nn.Module, kept: Any = None, experts: Any = None
) -> ExpertComposition:
    """What leaves out all but `kept`, or puts `experts` in place of the model's."""
    shapes = describe(model).layers
    return ExpertComposition(Made("mine", 0.5, 0, {}), experts or {}, shapes, kept)


def by_hand(model: Any, kept: dict[int, tuple[int, ...]]) -> torch.Tensor:
    """Logits of the dense model, where router logits of dropped experts are −∞."""
    linear, layers = F.linear, iter(kept.values())

    def without(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
        logits = linear(x, weight, *bias)
        if len(weight) == 4:  # only a router's, of one layer after the other
            logits[..., [*{0, 1, 2, 3} - {*next(layers)}]] = -torch.inf
        return logits

    with patch.object(F, "linear", without):
        return logits_of(model, IDS)


@pytest.mark.parametrize("family", REFERENCES)
def test_dropped_is_minus_infinity(family):
    """Leaving out experts is as if the router's logits of them were −∞."""
    model = tiny_model(family)
    kept = kept_of(model)
    expected = by_hand(model, kept)
    with dropping(model, kept):
        logits = logits_of(model, IDS)
    torch.testing.assert_close(logits, expected, **IN_SINGLE)
    assert (logits - logits_of(model, IDS)).abs().max() > 0.1


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_in_a_context_as_a_copy_and_on_disk(family, tmp_path):
    """All three have the same logits, also from the family's own stock class."""
    model = tiny_model(family)
    kept, before = kept_of(model), weights_of(model)
    dense = logits_of(model, IDS)
    with dropping(model, kept):
        applied = logits_of(model, IDS)
        small = describe(model)
    compression = composed(model, kept)
    copy: Any = compression.materialise(model)
    assert torch.equal(logits_of(copy, IDS), applied)
    assert (applied - dense).abs().max() > 0.01
    assert small.n_parameters == sum(p.numel() for p in copy.parameters())
    copy.save_pretrained(tmp_path / "out")
    loaded = reloaded(tmp_path / "out")
    assert type(loaded) is type(model)
    torch.testing.assert_close(logits_of(loaded, IDS), applied, **EXACT)
    torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0)
    assert torch.equal(logits_of(model, IDS), dense)


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "deepseek_v3"])
def test_the_copy_has_its_own_numbers(family):
    """In the configuration, which its modules share, and for the router's loss."""
    model: Any = tiny_model(family)
    copy: Any = composed(model, kept_of(model)).materialise(model)
    assert (model.config.num_local_experts, copy.config.num_local_experts) == (4, 3)
    assert copy.model.config is copy.config
    if family != "deepseek_v3":
        assert copy.num_experts == 3
        assert copy(IDS, output_router_logits=True).aux_loss.isfinite()


def test_the_model_is_alone_while_it_is_copied(monkeypatch):
    """Another thread that evaluates it meanwhile sees the dense model."""
    model = tiny_model("qwen2_moe")
    before, seen = [id(weight) for weight in model.parameters()], []
    copied = nn.Parameter.__deepcopy__

    def note(*args: Any) -> Any:
        seen.append([id(weight) for weight in model.parameters()])
        return copied(*args)

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", note)
    composed(model, kept_of(model)).materialise(model)
    assert seen
    assert all(weights == before for weights in seen)


# --- what is refused --------------------------------------------------------------


@pytest.mark.parametrize("family", NOT_DROPPABLE)
def test_other_routers_are_refused_by_name(family):
    """Nothing is sliced by guessing."""
    with pytest.raises(LayoutError, match=NOT_DROPPABLE[family]):
        find_expert_axes(tiny_model(family))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({0: (0, 1)}, r"of the layers \[0\], the model's MoE layers are \[0, 1\]"),
        ({0: (0, 1), 1: (3, 2)}, "layer 1 are .* ascending"),
        ({0: (0, 4), 1: (1, 2)}, "layer 0 are .* from 0 to 3"),
        ({0: (0, 1), 1: (2,)}, "layer 1 would keep 1 experts.* at least 2"),
    ],
)
def test_impossible_choices_are_refused(kept, message):
    """They are refused before anything changes."""
    model = tiny_model("qwen2_moe")
    dense = logits_of(model, IDS)
    with pytest.raises(SpecError, match=message), dropping(model, kept):
        pass
    assert torch.equal(logits_of(model, IDS), dense)


# --- composed experts against matrices multiplied out -----------------------------


def merged(layer: ExpertsLayer) -> Composition:
    """Experts 0 and 1 share the matrices of 2; the others have their own."""
    experts = [layer.expert(e) for e in range(2, layer.n_experts)]
    return [experts[0], experts[0], *experts]


def factored(layer: ExpertsLayer) -> Composition:
    """A common base, the mean, with a difference of rank 2 for each expert."""
    experts = dense_experts(layer)
    for name in ("gate", "up", "down") if layer.gated else ("up", "down"):
        stack = torch.stack([expert[name] for expert in experts])
        base = stack.mean(0)
        u, s, v = torch.linalg.svd(stack - base, full_matrices=False)
        left, right = u[..., :2] * s[:, None, :2], v[:, :2]
        for e, expert in enumerate(experts):
            parts = {name: base, f"{name}_left": left[e], f"{name}_right": right[e]}
            expert |= parts
    return experts


def by_product(model: nn.Module, experts: dict[int, Composition]) -> nn.Module:
    """The same model with its stock modules, whose matrices are multiplied out."""
    new = {
        (layer.layer, expert): {
            name: multiplied(experts[layer.layer][expert], name)
            for name in layer.expert(expert)
        }
        for layer in find_experts(model)
        for expert in range(layer.n_experts)
    }
    return replaced(model, new)


@pytest.mark.parametrize("family", REFERENCES)
@pytest.mark.parametrize("make", [merged, factored])
def test_composed_is_multiplied_out(make, family):
    """Applied and materialised; counted on the tensors of the copy."""
    model = tiny_model(family, **SIX)
    experts = {layer.layer: make(layer) for layer in find_experts(model)}
    expected = logits_of(by_product(model, experts), IDS)
    dense = logits_of(model, IDS)
    assert (expected - dense).abs().max() > 1e-3
    compressed = composed(model, experts=experts)
    with compressed.apply(model):
        torch.testing.assert_close(logits_of(model, IDS), expected, **CLOSE)
    assert torch.equal(logits_of(model, IDS), dense)
    small = compressed.materialise(model)
    torch.testing.assert_close(logits_of(small, IDS), expected, **CLOSE)
    stored = sum(weight.numel() for weight in small.parameters())
    assert compressed.savings(model).parameters[1] == stored


def test_what_does_not_fit_is_refused():
    """Numbers of experts, projections and layers, and a model that has such experts."""
    model = tiny_model("qwen3_moe")
    layer = find_experts(model)[0]
    stock = dense_experts(layer)
    ungated = [{k: w for k, w in expert.items() if k != "gate"} for expert in stock]
    for made, why in (
        ({0: []}, r"layer 0 has 0 new experts .*expected 4 experts"),
        ({0: stock[:1]}, r"layer 0 has 1 new experts .*expected 4 experts"),
        ({0: ungated}, r"the projections down, up; expected .* down, gate, up"),
        ({7: stock}, "another model"),
    ):
        with pytest.raises(SpecError, match=why), composing(model, made):
            pass
    small = composed(model, experts={0: merged(layer)}).materialise(model)
    with pytest.raises(LayoutError, match="already compressed"):
        find_experts(small)


def test_counts_by_hand():
    """Operations of a base with factors, with and without W_down."""
    part = {"up": torch.ones(3, 4)}
    part |= {"up_left": torch.ones(3, 1), "up_right": torch.ones(1, 4)}
    whole = part | {"down": torch.ones(4, 3), "down_bias": torch.ones(4)}
    assert flops_of(whole) == 2 * (12 + 3 + 4 + 12)
    assert flops_of(part) == 2 * (12 + 3 + 4)
