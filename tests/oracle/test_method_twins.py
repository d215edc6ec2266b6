"""benchmarks/method_twins.py: the restatements are those of ours, on a tiny model."""

from typing import Any

import pytest
import torch
from families import tiny_model
from methods_by_hand import IDS, SIX, WINDOWS

from benchmarks import method_twins
from heapr_lab.refinement.expert_calls import iter_expert_calls


def model_of(family: str) -> Any:
    """A tiny model of eight experts, of which one in eight is one."""
    return tiny_model(family, **dict.fromkeys(SIX, 8))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_the_plain_layer_is_the_models(family):
    """Its experts, routing and output equal what the model's own layers did."""
    model = model_of(family)
    layers = method_twins.layers_of(model, IDS)
    for layer, calls in zip(layers, iter_expert_calls(model, IDS), strict=True):
        x = torch.cat(layer.inputs)
        torch.testing.assert_close(x, calls.hidden_states)
        # the family's router computes the softmax in float32
        torch.testing.assert_close(layer.output(x), calls.output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["naee", "reap"])
def test_restatements_find_what_ours_find(name):
    """The same experts are kept in every layer."""
    model = model_of("qwen3_moe")
    compression: Any = method_twins.fitted(name, model, WINDOWS)
    assert compression.kept == method_twins.TWINS[name](model, IDS, 1)
    assert all(len(kept) == 7 for kept in compression.kept.values())


def test_merging_leaves_one_expert_less():
    """The merged W_down of eight experts are those of seven clusters, and ours."""
    model = model_of("qwen3_moe")
    merged = method_twins.hc_smoe(model, IDS, 1)
    assert [len(clusters) for clusters in merged.values()] == [7, 7]
    compression = method_twins.fitted("hc-smoe", model, WINDOWS)
    assert method_twins.agree(compression, merged)
    merged[0][3] += 1e-3
    assert not method_twins.agree(compression, merged)


def test_methods_with_gradients_are_found_by_what_they_do():
    """HEAPr computes them, and so does a method of the same statistics; REAP not."""
    model = model_of("qwen3_moe")
    names = ("heapr", "heapr-l", "reap")
    flags = [method_twins.by_gradients(name, model, WINDOWS) for name in names]
    assert flags == [True, True, False]
