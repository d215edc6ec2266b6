"""Pruning and saving streamed models, against the same of models in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import REPRESENTATIVES, tiny_model
from keeps import random_keep
from stored_tensors import tensors_in
from tiny_folder import opened, write_folder

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import window_nll
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.identity import model_identity
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.refinement import activation_grams
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.refinement.healing import heal
from heapr_lab.refinement.own_text import continuations
from heapr_lab.streaming.stream import stream_of
from heapr_lab.text.calibration import CalibrationSet

ROUNDED = {"nemotron_h"}
WINDOWS = CalibrationSet.from_ids(
    torch.randint(0, 48, (5, 16), generator=torch.Generator().manual_seed(0))
)


def both(family: str, folder: Path) -> list[Any]:
    """A tiny checkpoint in memory, and streamed, in float64."""
    write_folder(folder, tiny_model(family), max_shard_size="5KB")
    return [opened(folder, stream=way) for way in (False, True)]


def assert_saved_alike(models: list[Any], tmp_path: Path, family: str) -> Path:
    """Both have files with the same tensors, to the bit, and load."""
    folders = [
        save_pruned(model, tmp_path / f"pruned-{number}")
        for number, model in enumerate(models)
    ]
    expected, tensors = (tensors_in(folder) for folder in folders)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    first, second = (
        {path.name for path in folder.iterdir() if path.suffix != ".safetensors"}
        for folder in folders
    )
    assert second - first <= {"model.safetensors.index.json"}
    assert first <= second
    again = opened(folders[1], stream=False)
    tolerance = 1e-4 if family in ROUNDED else 1e-9
    losses = [window_nll(model, WINDOWS.ids) for model in (models[0], models[1], again)]
    assert torch.allclose(losses[1], losses[0], rtol=tolerance)
    assert torch.allclose(losses[2], losses[0], rtol=tolerance)
    return folders[1]


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_a_streamed_model_is_pruned_and_saved(family: str, tmp_path: Path) -> None:
    """The same files as of the model in memory, which load without heapr's help."""
    models = both(family, tmp_path / "dense")
    keep = random_keep(models[0])
    pruned = [prune(model, keep) for model in models]
    folder = assert_saved_alike(pruned, tmp_path, family)
    with masking(models[1], keep):
        masked = window_nll(models[1], WINDOWS.ids)
    streamed = opened(folder, stream=True)
    tolerance = 1e-4 if family in ROUNDED else 1e-9
    assert torch.allclose(window_nll(streamed, WINDOWS.ids), masked, rtol=tolerance)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_compensated_weights_are_saved(family: str, tmp_path: Path) -> None:
    """W_down of compensation replaces the file's."""
    models = both(family, tmp_path / "dense")
    keep = random_keep(models[0])
    down_projs = fit_compensation(models[0], keep, WINDOWS).down_projs
    pruned = [prune(model, keep, down_projs=down_projs) for model in models]
    assert_saved_alike(pruned, tmp_path, family)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek"])
@pytest.mark.parametrize("structure", ["per_layer", "uniform"])
def test_structures(family: str, structure: str, tmp_path: Path) -> None:
    """A uniform one becomes a stock checkpoint."""
    models = both(family, tmp_path / "dense")
    table = collect_statistics(models[0], WINDOWS)
    keep = select(table, ratio=0.5, structure=structure)
    assert_saved_alike([prune(model, keep) for model in models], tmp_path, family)


def test_whatever_layer_is_in_memory(tmp_path: Path) -> None:
    """The part of the dense model that was read last is not taken for the rest.

    It stays in memory, where it may be running.
    """
    models = both("qwen3_moe", tmp_path / "dense")
    keep = random_keep(models[0])
    stream_of(models[1]).fill(0)  # type: ignore[union-attr]
    pruned = [prune(model, keep) for model in models]
    assert not any(p.is_meta for p in models[1].model.layers[0].parameters())
    assert_saved_alike(pruned, tmp_path, "qwen3_moe")


def test_a_streamed_model_is_compensated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask and weights in memory; layers are read for all batches at once."""
    models = both("qwen3_moe", tmp_path / "dense")
    stream = stream_of(models[1])
    assert stream is not None
    half = Selection(0.5, estimator="elimination")
    fits = [CalibratedModel(model, WINDOWS).compensated(half) for model in models]
    assert fits[0][0].fingerprint == fits[1][0].fingerprint
    down_projs = [compensation.down_projs for _, compensation in fits]
    assert down_projs[0].keys() == down_projs[1].keys()
    for number, down in down_projs[0].items():
        assert torch.allclose(down_projs[1][number], down, rtol=1e-9)
    reads = []
    for n_tokens in (16, 80):  # in a batch: five batches, and two
        monkeypatch.setattr(activation_grams, "_TOKENS_AT_ONCE", n_tokens)
        before = stream.n_bytes_read
        CalibratedModel(models[1], WINDOWS).compensated(half)
        reads.append(stream.n_bytes_read - before)
    assert reads[0] == reads[1]


def test_one_part_is_in_memory(tmp_path: Path) -> None:
    """A part of the pruned model, or of the dense one that it is sliced from."""
    _, dense = both("qwen2_moe", tmp_path / "dense")
    pruned = prune(dense, random_keep(dense))
    seen = []

    def look(*_: Any) -> None:
        held = [
            block
            for model in (pruned, dense)
            for block in stream_of(model).blocks  # type: ignore[union-attr]
            if any(not p.is_meta for p in block.parameters())
        ]
        seen.append(len(held))

    for block in stream_of(pruned).blocks:  # type: ignore[union-attr]
        block.register_forward_hook(look)
    window_nll(pruned, WINDOWS.ids)
    assert set(seen) <= {0, 1}
    assert 1 in seen


def test_the_dense_model_stays_what_it_was(tmp_path: Path) -> None:
    """Its weights, its configuration and its loss."""
    in_memory, dense = both("gpt_oss", tmp_path / "dense")
    before = model_identity(in_memory)
    pruned = prune(dense, random_keep(dense), inplace=True)
    window_nll(pruned, WINDOWS.ids)
    assert model_identity(dense) == before
    assert torch.equal(
        window_nll(dense, WINDOWS.ids), window_nll(in_memory, WINDOWS.ids)
    )
    assert stream_of(pruned).n_bytes_read > 0  # type: ignore[union-attr]


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    """Training weights that are on disk, and writing text; the message says what to do.

    What was fitted of a streamed model was dropped, and its logits were not finite.
    """
    _, model = both("qwen3_moe", tmp_path)
    table = collect_statistics(model, WINDOWS)
    pruned = prune(model, select(table, ratio=0.4))
    refused: dict[str, Callable[[], object]] = {
        "to write text": lambda: continuations(model, WINDOWS.ids, n_new=2),
        "to heal": lambda: heal(pruned, model, WINDOWS),
    }
    for what, run in refused.items():
        with pytest.raises(SpecError, match=f"on disk.*stream=False.* {what}"):
            run()
