"""What a pass makes sure of before, during and after it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from families import tiny_ids, tiny_model
from torch import nn

from heapr_lab.errors import CoverageError, LayoutError
from heapr_lab.importance import measured
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=3))


@pytest.fixture
def model() -> nn.Module:
    """A tiny qwen2_moe that no other test uses: these change it."""
    return tiny_model("qwen2_moe")


def test_what_is_refused_before_anything_is_run(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken experts are refused, and those of which a rank holds only a part."""
    layer = find_experts(model)[1]
    with torch.no_grad():
        layer.down[2, :, 5] = torch.nan
    message = r"layers\.1\.mlp\.experts: 1 atoms have weights that are NaN.*\(2, 5\)"
    with pytest.raises(LayoutError, match=message):
        collect_statistics(model, WINDOWS)
    layer.module._is_expert_parallel = True
    with pytest.raises(LayoutError, match="expert-parallel"):
        collect_statistics(model, WINDOWS)
    assert caplog.messages == []


def test_windows_that_repeat_are_told(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """They count as often as they are there."""
    collect_statistics(model, CalibrationSet.from_ids(WINDOWS.ids[[0, 1, 0, 0]]))
    message = "2 of 4 calibration windows repeat another, and count as often"
    assert message in caplog.messages


def test_a_state_that_was_never_saved(model: nn.Module, tmp_path: Path) -> None:
    """It is not missed at the end of a short pass."""
    state = tmp_path / "pass.state"
    table = collect_statistics(model, WINDOWS, state=state)
    assert table.metadata["N"] == 24
    assert not state.exists()


def test_tokens_that_differ_from_layer_to_layer(model: nn.Module) -> None:
    """One layer of two experts per token, one of a single expert: a wrong count."""
    table = collect_statistics(model, WINDOWS)
    layers = find_experts(model)
    measured.check_coverage(table, layers)
    with pytest.raises(CoverageError, match="measured 64 atoms, expected 32"):
        measured.check_coverage(table, layers[:1])
    frame = table.frame
    for tokens in (
        np.where(frame["layer"] == 1, 1, frame["tokens"]),
        np.zeros(len(frame), dtype=np.int64),
    ):
        wrong = type(table).from_frame(frame.assign(tokens=tokens))
        with pytest.raises(CoverageError, match="routed tokens differ from layer to"):
            measured.check_coverage(wrong, layers)
