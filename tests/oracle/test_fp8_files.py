"""FP8 checkpoints that stay in FP8, against the same model dequantised and pruned."""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, manifest_of, said
from families import tiny_model
from keeps import full_keep, logits_of, widths_keep
from oracles.streamed import weights
from quantised_folder import in_fp8, of_each_weight, with_twin
from stored_tensors import same_tensors, tensors_in
from tiny_folder import D_VOCAB, write_folder, write_text
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from heapr_lab import CalibrationSet, KeepMask, heal, load_model, prune, save_pruned
from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.checkpoints.stored_type import file_types, round_changed
from heapr_lab.models.experts import sliced_experts
from heapr_lab.models.formats import stays_float32

BLOCK = 8, 4
IDS = torch.arange(2, 34).reshape(2, 16)
WIDTH = 16
"""The width of the pruned experts; the dense ones have 24 atoms."""


@dataclass
class Folders:
    """A model in FP8, the same dequantised, and a mask."""

    fp8: Path
    exact: Path
    keep: KeepMask


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def folders(request, tmp_path_factory) -> Folders:
    """Scales as Qwen3-MoE's (bfloat16) and DeepSeek-V3's (float32, shared experts)."""
    place = tmp_path_factory.mktemp(request.param)
    model = tiny_model(
        request.param,
        dtype=torch.bfloat16,
        moe_intermediate_size=24,
        vocab_size=D_VOCAB + 2,
        max_position_embeddings=2048,
    )
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.rand(buffer.shape)  # float32, as published
    folder = write_folder(place / "fp8", model)
    kind = torch.bfloat16 if request.param == "qwen3_moe" else None
    exact = with_twin(folder, partial(in_fp8, block=BLOCK, scales=kind))
    keep = widths_keep(model, WIDTH, structure="uniform")
    return Folders(folder, exact, keep)


def expert_weights(pruned: Any) -> dict[str, torch.Tensor]:
    """The weights of a model's sliced experts."""
    every = weights(pruned).items()
    return {name: w for name, w in every if ".experts." in name and w.dim() == 2}


def settings(folder: Path) -> dict[str, object] | None:
    """How config.json says that weights are quantised."""
    config = json.loads((folder / "config.json").read_text())
    return config.get("quantization_config")


ONE_FAMILY = pytest.mark.parametrize("folders", ["qwen3_moe"], indirect=True)
"""Of tests in which the other one would run the same code."""


@pytest.mark.parametrize(
    ("stream", "dtype"), [(True, "float32"), (False, "float32"), (True, None)]
)
def test_a_uniform_checkpoint_stays_in_fp8(folders, stream, dtype, tmp_path):
    """Unchanged tensors agree to the bit, the experts within the rounding of FP8.

    Either way of loading computes the same as the dequantised model.
    """
    twin, _ = load_model(folders.exact, device="cpu", dtype="float32", stream=False)
    if dtype is None:
        prune_folder(folders.fp8, folders.keep, tmp_path / "out")
    else:
        model, _ = load_model(folders.fp8, device="cpu", dtype=dtype, stream=stream)
        torch.testing.assert_close(logits_of(model, IDS), logits_of(twin, IDS))
        save_pruned(prune(model, folders.keep), tmp_path / "out")
    twin = prune(twin, folders.keep)
    save_pruned(twin, tmp_path / "twin", dtype=torch.float32)
    assert settings(tmp_path / "out") == settings(folders.fp8)
    before, after = tensors_in(folders.fp8), tensors_in(tmp_path / "out")
    wanted = tensors_in(tmp_path / "twin")
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype, name
        if "experts" not in name:
            assert torch.equal(tensor.float(), before[name].float()), name
    changed = [name for name in wanted if "experts" in name]
    assert len(changed) > 20
    for name in changed:
        scale = after[f"{name}_scale_inv"].float()
        each = of_each_weight(scale, wanted[name].shape, BLOCK)
        apart = (after[name].float() * each - wanted[name]).abs()
        assert (apart <= wanted[name].abs() / 15 + each / 1000).all(), name
    manifest = manifest_of(tmp_path / "out")
    assert "in FP8: those that changed are quantised again" in manifest["weights"]


def test_transformers_reads_the_same(folders, tmp_path):
    """The stock class reads equal experts; elsewhere last blocks are smaller here."""
    prune_folder(folders.fp8, folders.keep, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    )
    ours, _ = load_model(tmp_path / "out", device="cpu", dtype="bfloat16", stream=False)
    wanted = stock.state_dict()
    assert ours.config.moe_intermediate_size == WIDTH
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, wanted[name]) or "experts" not in name, name


@ONE_FAMILY
def test_a_mask_that_keeps_all_writes_the_same(folders, tmp_path):
    """Every tensor is the same to the bit, and so are those of a pruned checkpoint."""
    prune_folder(folders.fp8, folders.keep, tmp_path / "once")
    for source in (folders.fp8, tmp_path / "once"):
        model, _ = load_model(source, device="cpu", dtype="float32", stream=True)
        keep = KeepMask(full_keep(model).arrays, {"structure": "uniform"})
        save_pruned(prune(model, keep), tmp_path / f"all of {source.name}")
        same_tensors(source, tmp_path / f"all of {source.name}")


@ONE_FAMILY
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_measured_is_what_is_written(folders, stream, tmp_path):
    """Experts that are rounded in memory have the values that are read from the files.

    They are written as those that were not rounded.
    """
    model, _ = load_model(folders.fp8, device="cpu", dtype="bfloat16", stream=stream)
    save_pruned(prune(model, folders.keep), tmp_path / "plain")
    pruned = prune(model, folders.keep)
    round_changed(pruned, file_types(pruned))
    save_pruned(pruned, tmp_path / "rounded")
    same_tensors(tmp_path / "plain", tmp_path / "rounded")
    again, _ = load_model(tmp_path / "plain", device="cpu", dtype="bfloat16")
    read = logits_of(again, IDS)
    assert torch.equal(logits_of(pruned, IDS), read)
    assert not torch.equal(logits_of(prune(model, folders.keep), IDS), read)
    assert sliced_experts(pruned)


@ONE_FAMILY
def test_healed_experts_are_quantised_again(folders, tmp_path):
    """They are trained unrounded, from layers on disk; what is read is what is written.

    Only their rounding differs from what was trained, and all else is written in FP8 as
    it was, or in bfloat16.
    """
    model, _ = load_model(folders.fp8, device="cpu", dtype="float32", stream=True)
    pruned = prune(model, folders.keep)
    counted = torch.arange(20 * 9).reshape(20, 9) % 48
    heal(pruned, model, CalibrationSet.from_ids(counted), learning_rate=1e-2)
    round_changed(pruned, file_types(pruned))
    save_pruned(pruned, tmp_path / "out")
    assert settings(tmp_path / "out") == settings(folders.fp8)
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert "then healed on 135 tokens" in card
    again, _ = load_model(tmp_path / "out", device="cpu", dtype="float32", stream=True)
    rounded, sliced = prune(again, full_keep(again)), prune(model, folders.keep)
    types = file_types(rounded, torch.float32)  # as the files are dequantised
    round_changed(rounded, types)
    was, now, before = (expert_weights(net) for net in (pruned, rounded, sliced))
    for name, weight in was.items():
        assert torch.equal(weight, now[name]), name
        assert not torch.equal(weight, before[name]), name


@ONE_FAMILY
@pytest.mark.parametrize(
    ("structure", "width", "dtype"),
    [("ragged", 16, None), ("uniform", 8, None), ("uniform", 16, torch.float32)],
)
def test_others_are_written_in_floats(
    folders, structure, width, dtype,
    tmp_path
):  # fmt: skip
    """Widths that differ, that are no whole blocks, and a type that is asked for."""
    source = folders.fp8
    if width == 8:  # half a block
        shutil.copytree(folders.exact, tmp_path / "source")
        in_fp8(tmp_path / "source", (16, 16))
        source = tmp_path / "source"
    model, _ = load_model(source, device="cpu", dtype="float32", stream=True)
    keep = widths_keep(model, width, structure=structure)
    folder = save_pruned(prune(model, keep), tmp_path / "out", dtype=dtype)
    types = {name: tensor.dtype for name, tensor in tensors_in(folder).items()}
    kinds = {kind for name, kind in types.items() if not stays_float32(model, name)}
    assert kinds == {dtype or torch.bfloat16}
    assert (settings(folder) or {}).get("quant_method") != "fp8"
    card = (folder / "README.md").read_text()
    assert "dequantised from fp8" in card
    if dtype is None:
        n = 8 if structure == "ragged" else 16
        reason = f"needs the structure uniform and widths in multiples of {n}"
        assert reason in " ".join(card.split())


@ONE_FAMILY
def test_the_command_keeps_fp8(folders, cache, tmp_path):
    """It measures what is written, and says how many bytes that is."""
    text = "--corpus", write_text(tmp_path / "text.txt"), *TINY
    shape = "--ratio", 0.3, "--structure", "uniform", "--multiple", 8
    args = "prune", folders.fp8, *shape, "--method", "paper", "--device", "cpu", *text
    told = said(*args)
    healed = "--heal", 16, "--dtype", "float32"
    for name, options in {"as it is": (), "healed": healed}.items():
        out = tmp_path / name
        written = said(*args, *options, "--out", out)
        assert settings(out) == settings(folders.fp8)
        kinds = [tensor.dtype for tensor in tensors_in(out).values()]
        assert kinds.count(torch.float8_e4m3fn) > 20
        assert told["bytes_after"] == pytest.approx(written["bytes_after"], rel=0.2)
        manifest = manifest_of(out)
        assert manifest["reloaded"].startswith("Δ nll = 0.0000 on")
