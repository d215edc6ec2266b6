"""What a plan announces is what `load_model` does."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from tiny_folder import write_tokenizer

from heapr_lab.models import loading
from heapr_lab.models.footprint import (
    IN_MEMORY,
    PROCESS,
    STREAMED,
    Work,
    device_parts,
    sizes_of,
)
from heapr_lab.models.loading import load_model
from heapr_lab.models.memory import why_streamed
from heapr_lab.streaming.devices import Device
from heapr_lab.streaming.plan import INFEASIBLE, plan
from heapr_lab.streaming.stream import stream_of
from heapr_lab.workbench import workbench

CPU = Device("a processor", "cpu", 16e9, 1e11, 2e9, 1e9, "given by the test")
LENGTH = 512
"""Of a window whose activations are several times as large as the weights."""


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny model in float64."""
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint."""
    path: Path = tmp_path_factory.mktemp("moe")
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def needed(model: Any, itemsize: int, seq_len: int) -> float:
    """Bytes of the scores of one window in memory, besides the process."""
    work = Work(1, seq_len, seq_len, itemsize, "cpu")
    parts = device_parts(sizes_of(model), work, IN_MEMORY)
    return sum(parts.values()) - parts["process"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seq_len", [2, LENGTH])
@pytest.mark.parametrize("share", [0.1, 0.9, 0.99, 1.01, 2.0, 100.0])
def test_both_stream_the_same(
    dtype: str,
    seq_len: int,
    share: float,
    model: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With room for a share of the scores of one window in memory."""
    size = 4 if dtype == "float32" else 8
    room = round(share * needed(model, size, seq_len))
    monkeypatch.setattr(loading, "free_memory", lambda _device: room)
    loaded, _ = load_model(folder, device="cpu", dtype=dtype, seq_len=seq_len)
    streams = stream_of(loaded) is not None
    asked = {"seq_len": seq_len, "dtype": dtype, "device": CPU}
    found = plan(folder, device_memory=round(room + PROCESS["cpu"]), **asked)
    assert streams == (share < 1)
    assert found.engine in ({STREAMED, INFEASIBLE} if streams else {IN_MEMORY})
    assert "stream=True" not in found.why


def test_weights_fit_and_the_pass_does_not(
    model: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is streamed, with the numbers; where they are told, nothing is missing."""
    weights = 4 * sum(p.numel() for p in model.parameters())
    room = round(0.9 * needed(model, 4, LENGTH))
    assert max(weights / 0.8, needed(model, 4, 2)) < room
    monkeypatch.setattr(loading, "free_memory", lambda _device: room)
    assert stream_of(load_model(folder, device="cpu", seq_len=2)[0]) is None
    assert caplog.text == ""
    assert stream_of(load_model(folder, device="cpu", seq_len=LENGTH)[0]) is not None
    for said in (f"{room / 1e9:.3g} GB are free", f"need {weights / 1e9:.3g} GB"):
        assert said in caplog.text
    assert f"{needed(model, 4, LENGTH) / 1e9:.3g} GB in all" in caplog.text
    assert stream_of(load_model(folder, device="cpu", stream=False)[0]) is None
    memory, asked = round(room + PROCESS["cpu"]), {"device": CPU, "seq_len": LENGTH}
    whole, auto = (
        plan(folder, device_memory=memory, stream=way, **asked)
        for way in (False, "auto")
    )
    assert (whole.engine, auto.engine) == (INFEASIBLE, STREAMED)
    assert "open it with stream=True (--stream)" in whole.why


def test_a_workbench_leaves_room_for_its_own_windows(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length of its profile, or the one that is given."""
    room = 3 * 4 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(loading, "free_memory", lambda _device: room)
    for seq_len, streams in ((2, False), (LENGTH, True), (None, True)):
        bench = workbench.open_workbench(str(folder), seq_len=seq_len, device="cpu")
        assert (stream_of(bench.model) is not None) == streams


def test_weights_that_leave_a_gpu_no_room() -> None:
    """Above 80 %, though the scores of a short window would fit; below, they stay."""
    model = tiny_model("qwen3_moe", dtype=torch.float32, hidden_size=128)
    sizes, work = sizes_of(model), Work(1, 1, 1, 4, "cuda")
    weights = 4 * sizes.architecture.n_parameters
    parts = device_parts(sizes, work, IN_MEMORY)
    assert sum(parts.values()) - parts["process"] < 1.24 * weights
    assert why_streamed(model.config, sizes, work, 1.24 * weights) is not None
    assert why_streamed(model.config, sizes, work, 1.26 * weights) is None


def test_the_lab_model_is_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    """With half a gigabyte, and windows four times as long as those of its profile."""
    bench = workbench.open_workbench("lab", seq_len=1024, device="cpu")
    assert stream_of(bench.model) is None
    sizes, work = sizes_of(bench.model), Work(1, 1024, 0, 4, "cpu")
    assert why_streamed(bench.model.config, sizes, work, 0.5e9) is None
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
