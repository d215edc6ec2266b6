"""Layers run one by one compute what the model does, in one forward's arithmetic."""

import pytest
import torch
from families import REPRESENTATIVES, tiny_ids, tiny_model

from heapr_lab.errors import LayoutError
from heapr_lab.models.experts import find_experts
from heapr_lab.models.modes import evaluating
from heapr_lab.refinement import activation_grams as grams
from heapr_lab.streaming.layerwise import LayerByLayer
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

# Its layers get part of the embedding besides the states.
UNFIT = {"hy_v4"}
WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=8, seq_len=24))


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_sums_are_those_of_whole_forwards(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, for every family; those that cannot be stepped through say so."""
    model = tiny_model(family)
    expected = grams.collect_grams(model, WINDOWS, span="expert")
    monkeypatch.setattr(grams, "_AT_ONCE", 1)
    monkeypatch.setattr(grams, "_TOKENS_AT_ONCE", 48)  # several batches, one shorter
    several = grams.collect_grams(model, WINDOWS, span="expert")
    walked = grams.iter_grams(model, WINDOWS, span="expert")
    found = {layer.layer: own for layer, own in walked}
    assert found.keys() == expected.keys()
    for layer, own in found.items():
        assert torch.equal(own.sums, several[layer].sums)
        torch.testing.assert_close(own.sums, expected[layer].sums)


def test_what_cannot_be_stepped_through_is_refused() -> None:
    """A family whose layers get more than states."""
    (family,) = UNFIT
    model = tiny_model(family)
    with (
        evaluating(model),
        pytest.raises(LayoutError, match="cannot be run one by one"),
    ):
        LayerByLayer(model, list(WINDOWS.ids.split(4)), find_experts(model))
