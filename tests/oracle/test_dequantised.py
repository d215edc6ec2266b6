"""Quantised checkpoints, streamed and dequantised, against what transformers loads."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, invoke, manifest_of, run, said
from families import tiny_model, tiny_windows
from keeps import masked_nll, window_nll
from oracles.streamed import weights
from quantised_folder import (
    LAYOUTS,
    POWERS,
    WIDE,
    check_refused,
    configure,
    in_fp4,
    in_fp8,
    in_pairs,
    with_twin,
)
from stored_tensors import changed_json, changed_tensors, same_bits, tensors_in
from tiny_folder import D_VOCAB, write_folder, write_text
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.folders import read_config, skeleton_of
from heapr_lab.models.formats import stays_float32
from heapr_lab.models.loading import load_model
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.surgery import prune
from heapr_lab.recipes.export import savings
from heapr_lab.streaming.plan import plan
from heapr_lab.streaming.stream import stream_of
from heapr_lab.workbench.settings import PROFILES
from heapr_lab.workbench.workbench import Workbench

WINDOWS = tiny_windows(n_sequences=5, seq_len=16)


def in_mxfp4(folder: Path) -> None:
    """Replace the matrices of all experts by random blocks of 32 and exponents."""
    generator = torch.Generator().manual_seed(0)
    with changed_tensors(folder) as tensors:
        for name in [name for name in tensors if name.endswith("_proj")]:
            n_experts, inner, out = tensors.pop(name).shape
            size = n_experts, out, inner // 32
            blocks = torch.randint(0, 256, (*size, 16), generator=generator)
            exponents = torch.randint(120, 126, size, generator=generator)
            tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
            tensors[f"{name}_scales"] = exponents.to(torch.uint8)
    configure(folder, quant_method="mxfp4", modules_to_not_convert=["lm_head"])


DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""kv_a_proj_with_mqa has 576 rows, as DeepSeek-V3's: four blocks of 128 and a half."""
KINDS: dict[str, tuple[str, dict[str, int], Callable[[Path], Any]]] = {
    "fp8": ("qwen3_moe", {}, in_fp8),
    "fp8 of deepseek": ("deepseek_v3", {}, in_fp8),
    "fp8, odd blocks": ("qwen3_moe", {}, partial(in_fp8, block=(6, 5))),
    "fp8, half a block": ("deepseek_v3", DEEPSEEK, partial(in_fp8, block=(128, 128))),
    "mxfp4": ("gpt_oss", WIDE | {"intermediate_size": 64}, in_mxfp4),
    "fp4": ("deepseek_v4", WIDE, in_fp4),
    **{
        layout: ("qwen3_moe", WIDE, partial(in_pairs, layout=layout))
        for layout in LAYOUTS
    },
}
"""Family, sizes, and what quantises a folder and returns the exact weights."""
STOCK: dict[str, Any] = {
    "fp8 of deepseek": FineGrainedFP8Config(dequantize=True),
    "mxfp4": Mxfp4Config(dequantize=True),
}
"""Transformers' setting to dequantise a kind, where it can."""
EXACT = [kind for kind in KINDS if kind != "mxfp4"]


def format_in(kind: str) -> str:
    """What a card calls the format of a kind."""
    of_pairs = "mxfp4" if kind == POWERS else "nvfp4"
    return of_pairs if kind in LAYOUTS else kind.split()[0].rstrip(",")


def pair_of(kind: str, place: Path) -> tuple[Path, Path]:
    """A checkpoint of a kind, and the same with its exact weights in floats."""
    family, sizes, quantise = KINDS[kind]
    texts = {"vocab_size": D_VOCAB + 2, "max_position_embeddings": 2048}
    texts = {} if kind == "fp4" else texts  # of tables of 48 tokens
    model = tiny_model(family, dtype=torch.bfloat16, **sizes, **texts)
    packed = write_folder(place / "dense", model)
    return packed, with_twin(packed, quantise)


def types_in(folder: Path) -> set[torch.dtype]:
    """The types of all tensors but those that the family keeps in float32."""
    tensors, model = tensors_in(folder), skeleton_of(read_config(folder))
    return {t.dtype for name, t in tensors.items() if not stays_float32(model, name)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stock", STOCK)
def test_the_weights_are_those_of_transformers(stock, dtype, tmp_path):
    """They are equal bit for bit, in the type asked for, or that which stays."""
    folder, _ = pair_of(stock, tmp_path)
    kind = getattr(torch, dtype)
    whole = AutoModelForCausalLM.from_pretrained(
        folder, dtype=kind, quantization_config=STOCK[stock]
    )
    model, _ = load_model(folder, device="cpu", dtype=dtype, stream=True)
    assert stream_of(model) is not None
    wanted = {
        name: tensor.to(torch.float32 if stays_float32(whole, name) else kind)
        for name, tensor in whole.state_dict().items()
    }
    same_bits(weights(model), wanted)


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "auto") for kind in (*STOCK, "modelopt")), ("fp8", False)],
)
def test_it_is_scored_pruned_and_saved(kind, way, tmp_path):
    """Files are in bfloat16, without the quantisation, which card and manifest name.

    The panel estimates their size; bytes before are those of the quantised files.
    """
    packed, _ = pair_of(kind, tmp_path)
    model, tokenizer = load_model(packed, device="cpu", dtype="float32", stream=way)
    assert (stream_of(model) is not None) == (way == "auto")
    table = collect_statistics(model, WINDOWS)
    bench = Workbench(model, tokenizer, name="tiny", profile=PROFILES["small"])
    session: Any = PruningSession(table, workbench=bench)
    session.choose(Selection(0.5))
    masked = masked_nll(model, WINDOWS.ids, session.keep)
    folder = save_pruned(prune(model, session.keep), tmp_path / "pruned")
    again, _ = load_model(folder, device="cpu", dtype="float32", stream=False)
    assert torch.allclose(window_nll(again, WINDOWS.ids), masked, rtol=0.02)
    assert types_in(folder) == {torch.bfloat16}
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "heapr"
    assert config["dtype"] == "bfloat16"
    manifest = manifest_of(folder)
    stored = format_in(kind)
    told = f"dequantised from {stored} to bfloat16"
    assert told in manifest["weights"]
    assert told in (folder / "README.md").read_text()
    facts = savings(session.keep, table, source=bench.source)
    assert facts["bytes_before"] == (packed / "model.safetensors").stat().st_size
    assert facts["bytes_before"] == session.savings()["bytes_before"]
    # In float32, routers alone are a percent of so small a model.
    n_numbers = sum(tensor.numel() for tensor in tensors_in(folder).values())
    in_bfloat16 = n_numbers * torch.bfloat16.itemsize
    assert facts["bytes_after"] == pytest.approx(in_bfloat16, rel=0.01)
    assert facts["bytes_after_is"] == "an estimate, in bfloat16"
    assert session.bytes_are().endswith(" files, pruned in bfloat16: an estimate")


def test_the_command_prunes_it(cache, tmp_path, caplog):
    """By a table or a text. It streams by itself and says so."""
    packed, _ = pair_of("fp8", tmp_path)
    text = "--corpus", write_text(tmp_path / "text.txt"), "--n-sequences", 8, *TINY
    table, cpu = tmp_path / "table.parquet", ("--device", "cpu")
    base = "prune", packed, "--ratio", 0.5, *cpu
    run("score", packed, *cpu, *text, "--out", table)
    facts = said(*base, "--importance", table)
    assert facts["bytes_after"] == 2 * facts["parameters_after"]
    options = "--importance", table, "--estimator", "heapr"
    run(*base, *options, "--out", tmp_path / "table")
    result = invoke(*base, *text, "--out", tmp_path / "best")
    assert result.exit_code == 0, result.output
    assert "dequantised when they are read from disk" in caplog.text
    assert "writes no text of its own" in result.stderr
    assert types_in(tmp_path / "best") == {torch.bfloat16}
    manifest = manifest_of(tmp_path / "best")
    assert manifest["atoms_kept"] == manifest["atoms"] / 2


# --- against numbers that a test has made, in all kinds of blocks -----------------


@pytest.mark.parametrize("kind", EXACT)
def test_the_weights_are_the_numbers_times_their_scales(kind, tmp_path):
    """Each by that of its block, the last of which may be smaller, bit for bit.

    What was not quantised is unchanged. In NVFP4 two scales are multiplied. A plan
    counts numbers, neither bytes nor scales, and says that the model is streamed.
    """
    packed, exact = pair_of(kind, tmp_path)
    needs, whole = plan(packed), plan(exact)
    assert (needs.n_parameters, needs.n_atoms) == (whole.n_parameters, whole.n_atoms)
    stored = "fp8" if kind == "fp4" else format_in(kind)
    assert f"{stored}: they are" in needs.why
    wanted, *models = (
        load_model(folder, device="cpu", dtype="float32", stream=way)[0]
        for folder, way in ((exact, False), (packed, True), (packed, False))
    )
    close = {"rtol": 1e-6 if kind in LAYOUTS else 0, "atol": 0, "check_dtype": False}
    for ours in map(weights, models):
        torch.testing.assert_close(ours, weights(wanted), **close)


# --- scales that do not fit -------------------------------------------------------

OUTER = "model.layers.0.mlp.down_proj.weight_scale_inv"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
IN_FP4 = "layers.1.ffn.experts.2.w2.scale"
LOST = r"has no \S*scale\S*: download the files again"
SMALL = "expected 4 x 2 for blocks of 4 x 4"


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        # In memory transformers would take them for 1, without a word.
        ("fp8 of deepseek", OUTER, None, OUTER),
        ("fp8", f"{EXPERT}_scale_inv", lambda scale: scale.T, SMALL),
        ("fp8", f"{EXPERT}_scale_inv", lambda scale: scale[::2], SMALL),
        ("fp8", f"{EXPERT}_scale_inv", lambda scale: scale[:, :1], SMALL),
        ("fp8", f"{EXPERT}_scale_inv", lambda scale: scale[0, :1], SMALL),
        ("fp4", IN_FP4, None, LOST),
        (POWERS, f"{EXPERT}_scale", lambda scale: 2.0**scale, "exponents in bytes"),
        ("fp4", IN_FP4, lambda scale: scale[::2], "32 x 1 for blocks of 1 x 32"),
        ("modelopt", f"{EXPERT}_scale_2", None, LOST),
        ("compressed-tensors", f"{EXPERT}_global_scale", None, LOST),
        *(
            (layout, f"{EXPERT}_scale", change, message)
            for layout in LAYOUTS
            for change, message in (
                (None, LOST),
                (lambda scale: scale[::2], r"32 x \d for blocks of 1 x"),
            )
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(kind, name, change, message, tmp_path):
    """Before anything is written, also where they could still divide."""
    packed, _ = pair_of(kind, tmp_path)
    with changed_tensors(packed) as tensors:
        (name,) = (stored for stored in tensors if stored.endswith(name))
        scale = tensors.pop(name)
        if change is not None:
            tensors[name] = change(scale)
    check_refused(packed, message)


def test_missing_scales_of_mxfp4_are_named(tmp_path):
    """By what streams it; in memory, transformers says that it cannot convert."""
    packed, _ = pair_of("mxfp4", tmp_path)
    with changed_tensors(packed) as tensors:
        lost = next(name for name in tensors if name.endswith("_scales"))
        del tensors[lost]
    for stream, message in ((True, lost), (False, "conversion of the weights")):
        with pytest.raises(HeaprLabError, match=message):
            load_model(packed, device="cpu", stream=stream)


# --- formats that are not read ----------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_settings_beside_config_json_are_read(stream, tmp_path):
    """Folders of modelopt may have them in a file of their own, with any format."""
    packed, exact = pair_of("modelopt", tmp_path)
    with changed_json(packed) as config:
        del config["quantization_config"]
    beside = packed / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    model, _ = load_model(packed, device="cpu", dtype="float32", stream=stream)
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(weights(model)[name], tensors_in(exact)[name])
    assert plan(packed).engine
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    refused("modelopt (FP8)", packed)
    beside.write_text("[")
    for read in (plan, read_config):
        with pytest.raises(SpecError, match=r"hf_quant_config\.json.*it is damaged"):
            read(packed)


def refused(kind: str, folder: Path) -> None:
    """Check that any way to open a model names the format and says what to do."""
    message = rf"{re.escape(kind)}'.*that is not quantised, prune it, and quantise"
    check_refused(folder, message)
    with pytest.raises(SpecError, match=message):
        plan(folder)


def test_a_format_of_the_model_within_a_wrapper_is_refused(tmp_path):
    """It is named as in published wrappers: in the language model's configuration."""
    write_folder(tmp_path, tiny_model("qwen3_vl_moe"))
    with changed_json(tmp_path) as config:
        config["text_config"]["quantization_config"] = {"quant_method": "awq"}
    refused("awq", tmp_path)


GROUP = {"config_groups": {"group_0": {"format": "pack-quantized"}}}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *(({"quant_method": n, "bits": 4}, n) for n in ("awq", "gptq", "bitsandbytes")),
        (LAYOUTS["modelopt"] | {"quant_algo": "NVFP4_AWQ"}, "modelopt (NVFP4_AWQ)"),
        (LAYOUTS["modelopt"] | {"quant_algo": "FP8"}, "modelopt (FP8)"),
        (
            LAYOUTS["compressed-tensors"] | GROUP,
            "compressed-tensors (nvfp4-pack-quantized, pack-quantized)",
        ),
        (
            LAYOUTS["compressed-tensors"] | {"transform_config": {"a": 1}},
            "compressed-tensors (nvfp4-pack-quantized, with transforms)",
        ),
        ({"quant_method": "nvfp4"}, "nvfp4 ()"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors ()"),
    ],
)
def test_other_formats_are_refused_by_name(settings, name, tmp_path):
    """The error says what to do, whether layers would be streamed or not."""
    write_folder(tmp_path, tiny_model("qwen3_moe"))
    configure(tmp_path, **settings)
    refused(name, tmp_path)
