"""Layers run one by one compute what the model does, in one forward's arithmetic."""

from typing import Any

import pytest
import torch
from families import HANDING, REPRESENTATIVES, tiny_model, tiny_windows
from oracles.features import all_grams

from heapr_lab.errors import LayoutError
from heapr_lab.models.modes import evaluating
from heapr_lab.refinement import activation_grams as grams
from heapr_lab.streaming.layerwise import LayerByLayer
from heapr_lab.streaming.plan import state_of

WINDOWS = tiny_windows(n_sequences=8, seq_len=24)


@pytest.mark.parametrize("family", [*REPRESENTATIVES, *HANDING])
def test_sums_are_those_of_whole_forwards(family, monkeypatch):
    """Bit for bit, with what is of a batch and not of its shape, too."""
    model = tiny_model(family)
    expected = all_grams(model, WINDOWS)
    monkeypatch.setattr(grams, "_TOKENS_AT_ONCE", 48)  # several batches, one shorter
    several = all_grams(model, WINDOWS)
    monkeypatch.setattr(grams, "_AT_ONCE", 1)
    layers = all_grams(model, WINDOWS)
    assert layers.keys() == expected.keys()
    for layer, gram in layers.items():
        assert torch.equal(gram.sums, several[layer].sums)
        torch.testing.assert_close(gram.sums, expected[layer].sums)


@pytest.mark.parametrize("family", ["qwen3_moe", *HANDING])
def test_what_is_kept_between_layers_is_foreseen(family):
    """States of any width, and as many indices of tokens that are attended to."""
    model: Any = tiny_model(family)
    n_numbers, n_indices = state_of(model.config)
    with evaluating(model):
        walk = LayerByLayer(model, [WINDOWS.ids])
        for number in range(walk.n_layers):
            walk.run(number)
            assert walk.states[0][0, 0].numel() == n_numbers
            handed = walk.handed[0]
            assert 2 * (0 if handed is None else handed[0, 0].numel()) <= n_indices
    assert (handed is not None) == walk.hands_on == (family in HANDING[1:])


def test_what_cannot_be_stepped_through_is_refused():
    """A family whose layers get a part of a second embedding beside the states."""
    model = tiny_model("gemma4_text", hidden_size_per_layer_input=4)
    with (
        evaluating(model),
        pytest.raises(LayoutError, match="cannot be run one by one"),
    ):
        LayerByLayer(model, list(WINDOWS.ids.split(4)))
