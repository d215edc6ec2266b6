"""Sums and new weights of a streamed model beyond its budget, against those in memory.

Both models are streamed, so that results are the same to the bit.
"""

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from families import tiny_windows
from keeps import masked_nll, random_keep, window_nll
from oracles.streamed import free_on_disk, same_tables, written
from tiny_folder import opened

from heapr_lab import KeepMask, collect_statistics, prune
from heapr_lab.errors import SpecError
from heapr_lab.refinement import elimination
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compensation import LayerSolver, fit_compensation
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.refinement.elimination import eliminate
from heapr_lab.streaming.sweep_store import SweepStore

WINDOWS = tiny_windows(n_sequences=12, seq_len=16)
N_LAYERS = 4
SUMS = {"layer": (2, 1, 32, 32), "expert": (2, 4, 8, 8)}
"""Shapes of a layer's sums: 4 experts of 8 atoms."""
DOWN = (4, 16, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of four layers."""
    place = tmp_path_factory.mktemp("model")
    return written(place, "qwen3_moe", num_hidden_layers=N_LAYERS)


@pytest.fixture(autouse=True)
def files(cache, monkeypatch) -> Path:
    """The folder of the files; compensated weights are taken, better or not."""
    monkeypatch.setattr("heapr_lab.refinement.compensation.STANDARD_ERRORS", -math.inf)
    return cache / "sweeps"


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
def peak(monkeypatch, uncounted) -> Callable[[str], int]:
    """The most sums, or new W_down, in memory at a solve, and when a group is read."""
    counts: dict[str, list[int]] = {"sums": [0], "down_projs": [0]}

    def look(original: Any) -> Any:
        def looked(*args: Any, **options: Any) -> Any:
            counts["sums"].append(n_held(*SUMS.values()))
            counts["down_projs"].append(n_held(DOWN))
            return original(*args, **options)

        return looked

    for owner, name in (
        (LayerSolver, "solve"),
        (SweepStore, "get"),
        (elimination, "layer_costs"),
    ):
        monkeypatch.setattr(owner, name, look(getattr(owner, name)))
    return lambda kind: max(counts[kind])


# --- compress, compensate -----------------------------------------------------------


def compressed(model: Any) -> tuple[KeepMask, Any]:
    """A mask, and new weights, by `compress`."""
    fit = fit_compression(model, WINDOWS, ratio=0.5)
    return fit.keep, fit


def moved(model: Any) -> tuple[KeepMask, Any]:
    """The same, with steps on nine windows."""
    with patch("heapr_lab.refinement.descent.FEWEST_TOKENS", 0):
        keep, fit = compressed(model)
    assert fit.compensation.settings["steps"] == 4
    return keep, fit


def compensated(model: Any) -> tuple[KeepMask, Any]:
    """A mask, and new weights, by `compensate`."""
    keep = random_keep(model)
    return keep, fit_compensation(model, keep, WINDOWS)


@pytest.mark.parametrize("room", [0, 10_000])
@pytest.mark.parametrize("make", [compressed, moved, compensated])
def test_the_same_without_room(make, room, folder, files):
    """The same report, mask and weights, to the bit; they mask and prune like others.

    The pruned model reads them as long as it is used, and then no file stays.
    """
    fits, losses = [], []
    for budget in ("1GB", room):
        model = opened(folder, stream=True, host_memory=budget)
        keep, fit = make(model)
        masked = masked_nll(model, WINDOWS.ids, keep, fit.down_projs)
        pruned = prune(model, keep, down_projs=fit.down_projs)
        fits.append((keep.fingerprint, fit))
        losses.append(window_nll(pruned, WINDOWS.ids))
        assert torch.allclose(losses[-1], masked, rtol=1e-9)
        assert budget == "1GB" or list(files.rglob("*.safetensors"))
    (name, expected), (again, fit) = fits
    assert name == again
    assert fit.report.equals(expected.report)
    assert list(fit.down_projs) == list(expected.down_projs)
    for layer, down in fit.down_projs.items():
        assert torch.equal(down, expected.down_projs[layer])
    assert torch.equal(*losses)
    del model, pruned, fits, fit, expected
    assert not left(files)


@pytest.mark.parametrize("room", [0, "1GB"])
@pytest.mark.parametrize("make", [compressed, compensated])
def test_one_layer_is_in_memory(make, room, folder, peak):
    """Without room: the sums of one, its weights and the new ones, where all fit."""
    make(opened(folder, stream=True, host_memory=room))
    if room == 0:
        assert peak("sums") == 1
        assert peak("down_projs") <= 2
    else:
        assert peak("sums") >= N_LAYERS or make is compensated  # layer by layer
        assert peak("down_projs") >= N_LAYERS - (make is compensated)


def test_an_interrupted_one_leaves_no_file(folder, files, monkeypatch):
    """Not even those that a part of the layers was put into."""
    solve, stop = LayerSolver.solve, Mock(side_effect=[None, None, KeyboardInterrupt])

    def stopped(*args: Any, **options: Any) -> Any:
        stop()
        return solve(*args, **options)

    monkeypatch.setattr(LayerSolver, "solve", stopped)
    with pytest.raises(KeyboardInterrupt) as info:
        fit_compression(opened(folder, stream=True, host_memory=0), WINDOWS, ratio=0.5)
    assert len(list(files.rglob("*sums-*.safetensors"))) == N_LAYERS
    assert len(list(files.rglob("*down-*.safetensors"))) == 2
    del info
    assert not left(files)


def test_too_little_disk_is_an_error_before_the_work(folder, files, monkeypatch):
    """It says what is needed and what is there; one byte more is enough."""
    needed = N_LAYERS * 8 * (2 * 32 * 32 + 4 * 16 * 8)
    model = opened(folder, stream=True, host_memory=1000)
    enough = int((needed - 1000) / 0.9)
    free_on_disk(monkeypatch, enough - 2)
    with pytest.raises(SpecError, match=r"8\.19e-05 GB.*1e-06 GB.*HEAPR_CACHE_DIR"):
        fit_compression(model, WINDOWS, ratio=0.5)
    assert not left(files)
    free_on_disk(monkeypatch, enough + 2)
    CalibratedModel(model, WINDOWS)


# --- eliminate ----------------------------------------------------------------------


def test_eliminate(folder, files, peak):
    """The same scores; each layer's sums are dropped before the next one's are made."""
    model = opened(folder, stream=True, host_memory=0)
    table = collect_statistics(model, WINDOWS)
    disk = eliminate(model, table, WINDOWS)
    assert peak("sums") == 1
    same_tables(disk, eliminate(opened(folder, stream=False), table, WINDOWS))
    assert peak("sums") == N_LAYERS
    assert not left(files)
