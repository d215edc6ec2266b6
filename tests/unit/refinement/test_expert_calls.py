"""What the experts of each layer are called with, and what they return."""

import pytest
import torch
from families import REPRESENTATIVES, tiny_ids, tiny_model
from heard import Heard

from heapr_lab.models.experts import find_experts
from heapr_lab.refinement import expert_calls
from heapr_lab.refinement.expert_calls import iter_expert_calls


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_calls_are_those_of_a_forward_pass(family, alone, monkeypatch):
    """One layer at a time, of several batches, in order; run alone or with others."""
    if not alone:
        monkeypatch.setattr(expert_calls, "walk_over", lambda *_, **__: None)
    dense = tiny_model(family)
    ids = tiny_ids(n_sequences=5)
    layers = find_experts(dense)
    by_layer = {calls.layer.layer: calls for calls in iter_expert_calls(dense, ids)}
    assert sorted(by_layer) == [layer.layer for layer in layers]
    for layer in layers:
        calls = by_layer[layer.layer]
        assert not calls.top_k_index.is_floating_point()
        assert calls.hidden_states.shape == (ids.numel(), layer.d_expert)
        with torch.no_grad():
            again = layer.module(
                calls.hidden_states, calls.top_k_index, calls.top_k_weights
            )
        torch.testing.assert_close(again, calls.output)


def test_progress_of_calls_counts_decoder_layers():
    """Layers without experts count, too."""
    done = Heard()
    ids = tiny_ids(n_sequences=2)
    dense = tiny_model("deepseek_v2")
    for _ in iter_expert_calls(dense, ids, progress=done):
        pass
    assert done == [(1, 3), (2, 3), (3, 3)]
