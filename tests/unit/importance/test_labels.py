"""Labels that are drawn from the model, in place of the text's own tokens."""

import numpy as np
import pytest
import torch
from families import tiny_ids, tiny_model

from heapr_lab.errors import SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.likelihood import sampled_targets
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=6, seq_len=20))


def test_labels_of_the_model_are_drawn_from_it() -> None:
    """Other gradients than of the text, the same activations; in any batches."""
    model = tiny_model("qwen2_moe")
    text = collect_statistics(model, WINDOWS, batch_size=2)
    own = collect_statistics(model, WINDOWS, labels="model", batch_size=2)
    again = collect_statistics(model, WINDOWS, labels="model", batch_size=3)
    np.testing.assert_allclose(own.column("sum_h2"), text.column("sum_h2"))
    assert not np.allclose(own.column("sum_g2"), text.column("sum_g2"))
    np.testing.assert_allclose(own.column("sum_g2"), again.column("sum_g2"))
    assert own.metadata["spec_hash"] != text.metadata["spec_hash"]
    with pytest.raises(SpecError, match="labels is 'teacher'"):
        collect_statistics(model, WINDOWS, labels="teacher")


def test_sampled_targets_follow_the_predictions() -> None:
    """Frequencies of many draws at one position are its probabilities."""
    model = tiny_model("qwen2_moe")
    ids = WINDOWS.ids[:1, :3].repeat(4000, 1)
    drawn = sampled_targets(model, ids, seeds=range(4000))[:, 1]
    with torch.no_grad():
        expected = model(ids[:1]).logits[0, 1].softmax(-1)
    found = torch.bincount(drawn, minlength=len(expected)) / len(drawn)
    error = (found - expected).abs()
    assert (error <= 5 * (expected * (1 - expected) / len(drawn)).sqrt()).all()
