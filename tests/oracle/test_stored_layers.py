"""Sums and new weights of a streamed model beyond its budget, against those in memory.

Both models are streamed, so that results are the same to the bit.
"""

import gc
import math
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from keeps import random_keep
from tiny_folder import opened, write_folder

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import window_nll
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compensation import (
    Compensation,
    LayerSolver,
    fit_compensation,
)
from heapr_lab.refinement.compress import compress, fit_compression
from heapr_lab.refinement.elimination import eliminate
from heapr_lab.streaming.sweep_store import SweepStore
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(
    torch.randint(0, 48, (12, 16), generator=torch.Generator().manual_seed(0))
)
N_LAYERS = 4
SUMS = {"layer": (2, 1, 32, 32), "expert": (2, 4, 8, 8)}
"""Shapes of a layer's sums: 4 experts of 8 atoms."""
DOWN = (4, 16, 8)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four layers."""
    path = tmp_path_factory.mktemp("model")
    return write_folder(path, tiny_model("qwen3_moe", num_hidden_layers=N_LAYERS))


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files; compensated weights are taken, better or not."""
    monkeypatch.setattr("heapr_lab.refinement.compensation.STANDARD_ERRORS", -math.inf)
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sweeps"


def left(files: Path) -> list[Path]:
    """What is in the folder once nothing uses it."""
    gc.collect()
    return list(files.iterdir())


def n_held(*shapes: tuple[int, ...]) -> int:
    """Tensors of these shapes, with memory of their own, that are in memory."""
    tensors = (tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor)
    return len(
        {
            tensor.untyped_storage().data_ptr()
            for tensor in tensors
            if tuple(tensor.shape) in shapes and not tensor.is_meta
        }
    )


@pytest.fixture
def uncounted() -> None:
    """What is there before, of other tests say, is not looked at by `n_held`."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def peak(
    monkeypatch: pytest.MonkeyPatch,
    uncounted: None,
) -> Callable[[str], int]:
    """The most sums, or new W_down, in memory at a solve, and when a group is kept."""
    counts: dict[str, list[int]] = {"sums": [0], "down_projs": [0]}

    def look(original: Any) -> Any:
        def looked(*args: Any, **options: Any) -> Any:
            counts["sums"].append(n_held(*SUMS.values()))
            counts["down_projs"].append(n_held(DOWN))
            return original(*args, **options)

        return looked

    for owner, name in ((LayerSolver, "solve"), (SweepStore, "get")):
        monkeypatch.setattr(owner, name, look(getattr(owner, name)))
    return lambda kind: max(counts[kind])


def assert_same(one: Compensation, other: Compensation) -> None:
    """The new weights are the same to the bit."""
    assert list(one.down_projs) == list(other.down_projs)
    for layer in one.down_projs:
        assert torch.equal(one.down_projs[layer], other.down_projs[layer])


# --- compress -----------------------------------------------------------------------


def test_compress(folder: Path, files: Path) -> None:
    """The same report, mask and weights, to the bit; no file stays."""
    expected = fit_compression(
        opened(folder, stream=True, host_memory="1GB"), WINDOWS, ratio=0.5
    )
    assert expected.compensation is not None
    paths = left(files)
    for room in (0, 20_000):
        fit = fit_compression(
            opened(folder, stream=True, host_memory=room), WINDOWS, ratio=0.5
        )
        assert fit.keep.fingerprint == expected.keep.fingerprint
        assert fit.report.equals(expected.report)
        assert fit.compensation is not None
        assert_same(fit.compensation, expected.compensation)
        assert list(files.rglob("*.safetensors"))  # of the new weights
        del fit
        assert left(files) == paths
    del expected
    assert not left(files)


def test_the_pruned_model_reads_its_weights(folder: Path, files: Path) -> None:
    """It reads them as long as it is used."""
    losses = []
    for room in ("1GB", 0):
        model = opened(folder, stream=True, host_memory=room)
        pruned = compress(model, WINDOWS, ratio=0.5)
        losses.append(window_nll(pruned, WINDOWS.ids))
        assert room != 0 or list(files.rglob("*.safetensors"))
        del model, pruned
    assert torch.equal(*losses)
    assert not left(files)


@pytest.mark.parametrize("room", [0, "1GB"])
def test_one_layer_is_in_memory(
    room: int | str, folder: Path, peak: Callable[[str], int]
) -> None:
    """Without room: the sums of one, its weights and the new ones, where all fit."""
    model = opened(folder, stream=True, host_memory=room)
    fitted = CalibratedModel(model, WINDOWS.three_parts()[0])
    before = n_held(*SUMS.values()), n_held(DOWN)
    fit_compression(model, WINDOWS, ratio=0.5, fitted=fitted)
    assert before == (0, 0)
    if room == 0:
        assert peak("sums") == 1
        assert peak("down_projs") <= 2
    else:
        assert peak("sums") >= N_LAYERS
        assert peak("down_projs") >= N_LAYERS


class _StoppedError(Exception):
    """Raised by the test."""


def test_an_interrupted_one_leaves_no_file(
    folder: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even those that a part of the layers was put into."""
    solve, n_solved = LayerSolver.solve, 0

    def stopped(*args: Any, **options: Any) -> Any:
        nonlocal n_solved
        n_solved += 1
        if n_solved > 2:
            raise _StoppedError
        return solve(*args, **options)

    monkeypatch.setattr(LayerSolver, "solve", stopped)
    with pytest.raises(_StoppedError) as info:
        fit_compression(opened(folder, stream=True, host_memory=0), WINDOWS, ratio=0.5)
    assert len(list(files.rglob("sums-*.safetensors"))) == 0
    assert len(list(files.rglob("*sums-*.safetensors"))) == N_LAYERS
    assert len(list(files.rglob("*down-*.safetensors"))) == 2
    del info
    assert not left(files)


def test_too_little_disk_is_an_error_before_the_work(
    folder: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is needed and what is there; one byte more is enough."""
    needed = N_LAYERS * 8 * (2 * 32 * 32 + 4 * 16 * 8)
    model = opened(folder, stream=True, host_memory=1000)

    def free(n_bytes: int) -> None:
        usage = Usage(0, 0, n_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    free(int((needed - 1000) / 0.9) - 2)
    with pytest.raises(SpecError, match=r"8\.19e-05 GB.*1e-06 GB.*HEAPR_CACHE_DIR"):
        fit_compression(model, WINDOWS, ratio=0.5)
    assert not left(files)
    free(int((needed - 1000) / 0.9) + 2)
    CalibratedModel(model, WINDOWS)


# --- compensate, eliminate ----------------------------------------------------------


def test_compensate(folder: Path, files: Path, peak: Callable[[str], int]) -> None:
    """The weights of one layer are in memory; they mask and prune like others."""
    model = opened(folder, stream=True, host_memory=0)
    keep = random_keep(model)
    fit = fit_compensation(model, keep, WINDOWS)
    assert peak("sums") == 1
    assert peak("down_projs") <= 2
    kept = opened(folder, stream=True, host_memory="1GB")
    expected = fit_compensation(kept, keep, WINDOWS)
    assert_same(fit, expected)
    assert fit.report.equals(expected.report)
    with masking(model, keep, fit.down_projs), masking(kept, keep, expected.down_projs):
        masked = [window_nll(net, WINDOWS.ids) for net in (model, kept)]
    pruned = prune(model, keep, down_projs=fit.down_projs)
    del fit, expected
    assert torch.equal(*masked)
    assert torch.allclose(window_nll(pruned, WINDOWS.ids), masked[0], rtol=1e-9)
    del pruned
    assert not left(files)


@pytest.mark.usefixtures("uncounted")
def test_eliminate(folder: Path, monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    """The same scores; each layer's sums are dropped before the next one's are made."""
    from heapr_lab.refinement import elimination

    layer_costs, held = elimination.layer_costs, []

    def looked(*args: Any, **options: Any) -> Any:
        held.append(n_held(*SUMS.values()))
        return layer_costs(*args, **options)

    monkeypatch.setattr(elimination, "layer_costs", looked)
    model = opened(folder, stream=True, host_memory=0)
    table = collect_statistics(model, WINDOWS)
    disk = eliminate(model, table, WINDOWS)
    in_memory = opened(folder, stream=False)
    ram = eliminate(in_memory, table, WINDOWS)
    assert set(held[:N_LAYERS]) == {1}
    assert set(held[N_LAYERS:]) == {N_LAYERS}
    assert torch.allclose(
        *(torch.tensor(rows.score("elimination").to_numpy()) for rows in (disk, ram)),
        rtol=1e-9,
    )
    assert not left(files)
