"""Constants in place of experts, and zeros in place of weights, against loops."""

from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_model
from methods_by_hand import FAMILIES, IDS, SIX, WINDOWS, fitted, lowest, routed
from oracles.token_by_token import matrices
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import Measurements
from heapr_lab.methods.mone import OUTPUT_MOMENTS
from heapr_lab.models.experts import find_experts

# --- MoNE -------------------------------------------------------------------------


Outputs = dict[tuple[int, int], tuple[np.ndarray, float]]


def outputs_by_hand(model: nn.Module) -> Outputs:
    """Each expert's outputs (n, D) and Σ p, one token after the other."""
    return {
        key: (np.array([t.E.numpy() for t in tokens]), sum(float(t.p) for t in tokens))
        for key, tokens in routed(model).items()
    }


def mone_scores(outputs: Outputs, kind: str) -> dict[Any, float]:
    """The routing weight of a mean token, the spread of the output, or both."""
    scores = {}
    for key, (f, p) in outputs.items():
        variance = np.var(f, axis=0, ddof=1) if len(f) > 1 else np.zeros(1)
        routing = p / IDS.numel()
        scores[key] = {
            "variance": float(np.sqrt((variance**2).sum())),
            "routing": routing,
            "product": routing * float(np.sqrt(variance.sum())),
        }[kind]
    return scores


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "product") for family in (*FAMILIES, "gpt_oss", "nemotron_h")),
        *(("mixtral", kind) for kind in ("variance", "routing")),
    ],
)
def test_mone_by_a_loop(family, kind):
    """The experts of the lowest scores are p times the mean of what they put out."""
    model = tiny_model(family, **SIX)
    outputs = outputs_by_hand(model)
    scores = mone_scores(outputs, kind)
    moments = Measurements(model, WINDOWS).collected(OUTPUT_MOMENTS)
    expected: set[Any] = set()
    for layer, of_layer in moments.items():
        by_hand = {key: score for key, score in scores.items() if key[0] == layer}
        assert of_layer.scores(kind) == pytest.approx([*by_hand.values()])
        expected |= lowest(by_hand, 2)
    for scope, keys in (("global", lowest(scores, 4)), ("layer", expected)):
        compression = fitted("mone", model, 0.34, scope=scope, score=kind)
        assert constants_in(compression.materialise(model), model, outputs) == keys


def constants_in(small: nn.Module, model: nn.Module, outputs: Outputs) -> set[Any]:
    """The experts that are p times the mean of their outputs; all others are dense."""
    constants, layers = set(), find_experts(model)
    x = torch.randn(3, layers[0].d_expert, dtype=torch.float64)
    for layer in layers:
        for expert in range(6):
            index, p = torch.full((3, 1), expert), torch.full((3, 1), 0.25).double()
            after = small.get_submodule(layer.name)(x, index, p).detach()
            if not torch.equal(after[0], after[1]):
                torch.testing.assert_close(after, layer.module(x, index, p).detach())
                continue
            mean = 0.25 * outputs[layer.layer, expert][0].mean(0)
            np.testing.assert_allclose(after[0].numpy(), mean, rtol=1e-6, atol=1e-7)
            constants.add((layer.layer, expert))
    return constants


def test_mone_may_replace_every_expert_of_a_layer():
    """The router stays, so there is no least number; a wrong option is refused."""
    model = tiny_model("mixtral")
    pruned = fitted("mone", model, 0.95)
    assert pruned.achieved_ratio == 0.75
    assert fitted("mone", model, 0.99, scope="global").achieved_ratio == 7 / 8
    assert pruned.savings(model).routed_flops[1] < pruned.savings(model).routed_flops[0]
    with pytest.raises(SpecError, match="must be one of 'layer', 'global'"):
        fitted("mone", model, 0.5, scope="model")


# --- MoE-Pruner -------------------------------------------------------------------


def pruner_scores(model: nn.Module) -> dict[Any, np.ndarray]:
    """|W| · ‖p · x‖ of every matrix, one token and slot after the other."""
    scores, modules = {}, {layer.layer: layer.module for layer in find_experts(model)}
    for (layer, expert), tokens in routed(model).items():
        outer = sum((t.p.numpy() * t.x.numpy()) ** 2 for t in tokens)
        inner = sum((t.p.numpy() * t.h.numpy()) ** 2 for t in tokens)
        for name, w in matrices(modules[layer], expert).items():
            if w is None or not name.startswith("W_"):
                continue
            norms = np.sqrt(inner if name == "W_down" else outer)
            size = np.abs(w.detach().numpy())
            key = layer, expert, name.removeprefix("W_")
            scores[key] = size * norms if tokens else size
    return scores


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_weights_of_the_lowest_score_are_zero(family):
    """The lowest of each row; the others are those of the model."""
    model = tiny_model(family)
    scores = pruner_scores(model)
    small = fitted("moe-pruner", model, 0.5).materialise(model)
    for layer in find_experts(small):
        dense = next(o for o in find_experts(model) if o.layer == layer.layer)
        for expert in range(layer.n_experts):
            before = dense.expert(expert)
            for name, w in layer.expert(expert).items():
                if name.endswith("_bias"):
                    assert torch.equal(w, before[name])
                    continue
                score = scores[layer.layer, expert, name]
                kept = np.zeros_like(score, dtype=bool)
                for row, keep in zip(score, kept, strict=True):
                    keep[np.argsort(row, kind="stable")[len(row) // 2 :]] = True
                expected = np.where(kept, before[name].numpy(), 0)
                np.testing.assert_array_equal(w.numpy(), expected)


def test_zeros_are_counted_honestly():
    """There are no fewer bytes or operations, as nothing is packed."""
    model = tiny_model("mixtral")
    savings = fitted("moe-pruner", model, 0.5).savings(model)
    assert savings.bytes[0] == savings.bytes[1] == 8 * savings.parameters[0]
    assert savings.routed_flops[0] == savings.routed_flops[1] > 0
