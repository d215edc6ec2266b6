"""What a pass makes sure of before, during and after it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from families import tiny_ids, tiny_model
from torch import nn

from heapr_lab.errors import CoverageError, HeaprLabError, LayoutError, SpecError
from heapr_lab.importance import measured, resuming
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=3))


@pytest.fixture
def model() -> nn.Module:
    """A tiny qwen2_moe in float64."""
    return tiny_model("qwen2_moe")


def test_what_is_refused_before_anything_is_run(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch size by its name, tokens that there are not, experts that are broken."""
    with pytest.raises(SpecError, match=r"batch_size\b"):
        collect_statistics(model, WINDOWS, batch_size=0)
    layer = find_experts(model)[1]
    with torch.no_grad():
        layer.down[2, :, 5] = torch.nan
    said = r"layers\.1\.mlp\.experts: 1 atoms have weights that are NaN.*\(2, 5\)"
    with pytest.raises(LayoutError, match=said):
        collect_statistics(model, WINDOWS)
    layer.module._is_expert_parallel = True
    with pytest.raises(LayoutError, match="expert-parallel"):
        collect_statistics(model, WINDOWS)
    assert caplog.messages == []


def test_the_table_says_whose_labels(model: nn.Module) -> None:
    """Where they are not the text's."""
    table = collect_statistics(model, WINDOWS, labels="model")
    assert table.metadata["spec"]["labels"] == "model"


def test_windows_that_repeat_are_told(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """They count as often as they are there."""
    collect_statistics(model, CalibrationSet.from_ids(WINDOWS.ids[[0, 1, 0, 0]]))
    said = "2 of 4 calibration windows repeat another, and count as often"
    assert said in caplog.messages


def test_a_state_that_was_never_saved(model: nn.Module, tmp_path: Path) -> None:
    """Is not missed at the end of a short pass."""
    state = tmp_path / "pass.state"
    table = collect_statistics(model, WINDOWS, state=state)
    assert table.metadata["N"] == 24
    assert not state.exists()


def test_weights_that_change_on_the_way(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End the pass, and before its state is saved."""

    def train(_done: int, _total: int) -> None:
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)

    with pytest.raises(HeaprLabError, match="weights of the model changed"):
        collect_statistics(model, WINDOWS, progress=train)
    monkeypatch.setattr(resuming, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(resuming, "_SAVE_SHARE", float("inf"))
    state = tmp_path / "pass.state"
    with pytest.raises(HeaprLabError, match="weights of the model changed"):
        collect_statistics(model, WINDOWS, progress=train, batch_size=1, state=state)
    assert not state.exists()


def test_windows_made_in_inference_mode(model: nn.Module) -> None:
    """Are measured as any others."""
    with torch.inference_mode():
        ids = WINDOWS.ids.clone()
    table = collect_statistics(model, CalibrationSet.from_ids(ids))
    assert table.metadata["N"] == 24


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


def test_when_it_was_made_to_the_second(model: nn.Module) -> None:
    """In UTC."""
    created = collect_statistics(model, WINDOWS).metadata["provenance"]["created"]
    assert len(created) == len("2026-01-01T00:00:00+00:00")
    assert created.endswith("+00:00")
