"""Quantised checkpoints, streamed and dequantised, against what transformers loads."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, invoke, one_line, run
from families import tiny_model
from keeps import random_keep
from quantised_folder import LAYOUTS, check_refused, configure, in_fp8, in_nvfp4
from stored_tensors import changed_json, changed_tensors, tensors_in
from tiny_folder import D_VOCAB, write_folder, write_text
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from wrappers import tiny_wrapper

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.evaluation.perplexity import window_nll
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.dtypes import format_of
from heapr_lab.models.folders import read_config
from heapr_lab.models.loading import load_model
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.recipes.export import savings
from heapr_lab.streaming.plan import plan
from heapr_lab.streaming.quantisation import unpacked
from heapr_lab.streaming.stream import stream_of
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.workbench.settings import PROFILES
from heapr_lab.workbench.workbench import Workbench

WINDOWS = CalibrationSet.from_ids(
    torch.randint(0, 48, (5, 16), generator=torch.Generator().manual_seed(0))
)
KINDS = {
    "fp8": ("qwen3_moe", FineGrainedFP8Config(dequantize=True)),
    "fp8 of deepseek": ("deepseek_v3", FineGrainedFP8Config(dequantize=True)),
    "mxfp4": ("gpt_oss", Mxfp4Config(dequantize=True)),
}


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


@pytest.fixture(params=sorted(KINDS))
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint, and transformers' setting to dequantise it."""
    family, setting = KINDS[request.param]
    wide = {"vocab_size": D_VOCAB + 2, "max_position_embeddings": 2048}
    if family == "gpt_oss":
        wide |= {"hidden_size": 32, "intermediate_size": 64}
    model = tiny_model(family, dtype=torch.bfloat16, **wide)
    write_folder(tmp_path / "dense", model)
    (in_mxfp4 if family == "gpt_oss" else in_fp8)(tmp_path / "dense")
    return tmp_path / "dense", setting


def types_in(folder: Path) -> set[torch.dtype]:
    """The types of all tensors but a router's corrections, which stay in float32."""
    tensors = tensors_in(folder)
    return {t.dtype for name, t in tensors.items() if "correction_bias" not in name}


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """All weights, in memory or streamed."""
    stream = stream_of(model)
    return model.state_dict() if stream is None else dict(stream.each(torch.clone))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_weights_are_those_of_transformers(
    quantised: tuple[Path, Any], dtype: str
) -> None:
    """They are equal bit for bit, in the type that is asked for."""
    folder, setting = quantised
    kind = getattr(torch, dtype)
    whole = AutoModelForCausalLM.from_pretrained(
        folder, dtype=kind, quantization_config=setting
    )
    model, _ = load_model(folder, device="cpu", dtype=dtype, stream=True)
    assert stream_of(model) is not None
    weights, wanted = weights_of(model), whole.state_dict()
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert weights[name].dtype == kind, name
        assert torch.equal(weights[name], tensor.to(kind)), name


def test_it_is_scored_pruned_and_saved(
    quantised: tuple[Path, Any], tmp_path: Path
) -> None:
    """Files are in bfloat16, without the quantisation, which card and manifest name."""
    model, _ = load_model(quantised[0], device="cpu", dtype="float32", stream=True)
    keep = select(collect_statistics(model, WINDOWS), ratio=0.5)
    with masking(model, keep):
        masked = window_nll(model, WINDOWS.ids)
    folder = save_pruned(prune(model, keep), tmp_path / "pruned")
    again, _ = load_model(folder, device="cpu", dtype="float32", stream=False)
    assert torch.allclose(window_nll(again, WINDOWS.ids), masked, rtol=0.02)
    assert types_in(folder) == {torch.bfloat16}
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "heapr"
    assert config["dtype"] == "bfloat16"
    manifest = json.loads((folder / "heapr_manifest.json").read_text())
    method = json.loads((quantised[0] / "config.json").read_text())
    kind = method["quantization_config"]["quant_method"]
    assert f"dequantised from {kind} to bfloat16" in manifest["weights"]
    assert f"dequantised from {kind} to bfloat16" in (folder / "README.md").read_text()


def test_the_panel_estimates_what_is_written(
    quantised: tuple[Path, Any], tmp_path: Path
) -> None:
    """Bytes before are those of the quantised files, bytes after of bfloat16 ones."""
    model, tokenizer = load_model(quantised[0], device="cpu", dtype="float32")
    bench = Workbench(model, tokenizer, name="tiny", profile=PROFILES["small"])
    table = collect_statistics(model, WINDOWS)
    session = PruningSession(table, workbench=bench)
    session.choose(Selection(0.5))
    shown = session.savings()
    assert shown is not None
    folder = save_pruned(prune(model, session.keep), tmp_path / "pruned")
    written = sum(tensor.nbytes for tensor in tensors_in(folder).values())
    row = shown.iloc[0]
    assert row.bytes_before == (quantised[0] / "model.safetensors").stat().st_size
    assert row.bytes_after == pytest.approx(written, rel=0.01)
    told = savings(session.keep, table, source=bench.source)
    assert told["bytes_after"] == row.bytes_after
    assert told["bytes_after_is"] == "an estimate, in bfloat16"
    assert session.bytes_are().endswith(" files, pruned in bfloat16: an estimate")


def test_the_command_prunes_it(
    quantised: tuple[Path, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It streams by itself and says so; files are in bfloat16."""
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    text = "--corpus", write_text(tmp_path / "text.txt"), *TINY
    out = tmp_path / "pruned"
    result = invoke(
        "prune", quantised[0], "--ratio", 0.5, "--device", "cpu", *text, "--out", out
    )
    assert result.exit_code == 0, result.output
    assert "dequantised when they are read from disk" in caplog.text
    assert "writes no text of its own" in result.stderr
    assert types_in(out) == {torch.bfloat16}
    manifest = json.loads((out / "heapr_manifest.json").read_text())
    assert manifest["atoms_kept"] == manifest["atoms"] / 2


def test_a_table_of_its_own_prunes_it(
    quantised: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table or a text: the same weights."""
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    text = "--corpus", write_text(tmp_path / "text.txt"), "--n-sequences", 8, *TINY
    table, base = tmp_path / "table.parquet", ("prune", quantised[0], "--ratio", 0.5)
    run("score", quantised[0], "--device", "cpu", *text, "--out", table)
    facts = json.loads(run(*base, "--importance", table, "--device", "cpu", "--json"))
    assert facts["bytes_after"] == 2 * facts["parameters_after"]
    ways = {
        "table": ("--importance", table, "--estimator", "heapr"),
        "text": ("--method", "paper", *text),
    }
    written = {}
    for name, options in ways.items():
        out = tmp_path / name
        run(*base, *options, "--device", "cpu", "--out", out)
        written[name] = tensors_in(out)
    assert written["table"].keys() == written["text"].keys()
    for name, tensor in written["text"].items():
        assert torch.equal(written["table"][name], tensor), name


def test_missing_scales_are_an_error(quantised: tuple[Path, Any]) -> None:
    """Weights would be read as if all scales were 1."""
    with changed_tensors(quantised[0]) as tensors:
        lost = next(name for name in tensors if "_scale" in name)
        del tensors[lost]
    with pytest.raises(LayoutError, match=lost):
        load_model(quantised[0], device="cpu", stream=True)


def test_scales_outside_the_experts_may_not_be_missing(tmp_path: Path) -> None:
    """In memory transformers would take them for 1, without a word."""
    write_folder(tmp_path / "dense", tiny_model("deepseek_v3", dtype=torch.bfloat16))
    in_fp8(tmp_path / "dense")
    with changed_tensors(tmp_path / "dense") as tensors:
        lost = "model.layers.0.mlp.down_proj.weight_scale_inv"
        del tensors[lost]
    check_refused(tmp_path / "dense", lost)


DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""kv_a_proj_with_mqa has 576 rows, as DeepSeek-V3's: four blocks of 128 and a half."""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("family", "changes", "block"),
    [("qwen3_moe", {}, (6, 5)), ("deepseek_v3", DEEPSEEK, (128, 128))],
)
def test_the_last_block_may_be_smaller(
    family: str, changes: dict[str, int], block: tuple[int, int], stream: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Each weight is multiplied by the scale of its block of the configured size."""
    model = tiny_model(family, dtype=torch.bfloat16, **changes)
    write_folder(tmp_path / "dense", model)
    shutil.copytree(tmp_path / "dense", tmp_path / "exact")
    exact = in_fp8(tmp_path / "dense", block)
    assert any(tensor.shape[0] % block[0] for tensor in exact.values())
    with changed_tensors(tmp_path / "exact") as tensors:
        tensors |= exact
    wanted, _ = load_model(tmp_path / "exact", device="cpu", stream=False)
    loaded, _ = load_model(tmp_path / "dense", device="cpu", stream=stream)
    weights = weights_of(loaded)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("grid", ["transposed", "rows", "columns"])
def test_scales_of_other_blocks_are_refused(grid: str, tmp_path: Path) -> None:
    """Refused in one line, where rows and columns could still be divided by them."""
    write_folder(tmp_path / "dense", tiny_model("qwen3_moe", dtype=torch.bfloat16))
    in_fp8(tmp_path / "dense")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    with changed_tensors(tmp_path / "dense") as tensors:
        scale = tensors[f"{name}_scale_inv"]
        assert tensors[name].shape == (16, 8)
        assert scale.shape == (4, 2)
        grids = {"transposed": scale.T, "rows": scale[::2], "columns": scale[:, :1]}
        tensors[f"{name}_scale_inv"] = grids[grid]
    check_refused(tmp_path / "dense", r"expected 4 x 2 for blocks of 4 x 4")


@pytest.fixture
def in_fp4(tmp_path: Path) -> tuple[Path, Path]:
    """DeepSeek-V4 as it is published, with its experts in four bits, and in floats."""
    wide = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}
    model = tiny_model("deepseek_v4", dtype=torch.bfloat16, **wide)
    write_folder(tmp_path / "fp4", model)
    shutil.copytree(tmp_path / "fp4", tmp_path / "exact")
    generator, exact = torch.Generator().manual_seed(0), {}
    with changed_tensors(tmp_path / "fp4") as tensors:
        for name in [n for n in tensors if ".experts." in n]:
            packed = torch.randint(0, 256, (32, 16), generator=generator).byte()
            powers = torch.randint(-6, -1, (32, 1), generator=generator)
            exact[name] = unpacked(packed) * 2.0**powers
            tensors[name] = packed.view(torch.int8)
            scales = (127 + powers).byte().view(torch.float8_e8m0fnu)
            tensors[name.replace(".weight", ".scale")] = scales
    with changed_tensors(tmp_path / "exact") as tensors:
        tensors |= {name: t.to(torch.bfloat16) for name, t in exact.items()}
    block = {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    configure(tmp_path / "fp4", quant_method="fp8", **block)
    return tmp_path / "fp4", tmp_path / "exact"


@pytest.mark.parametrize("stream", [True, False])
def test_experts_in_four_bits(in_fp4: tuple[Path, Path], stream: bool) -> None:
    """They are read, and a plan counts two numbers in a byte, and no scales."""
    assert plan(in_fp4[0]).n_atoms == plan(in_fp4[1]).n_atoms == 3 * 4 * 32
    assert plan(in_fp4[0]).n_parameters == plan(in_fp4[1]).n_parameters
    exact, model = (
        load_model(folder, device="cpu", dtype="bfloat16", stream=stream)[0]
        for folder in reversed(in_fp4)
    )
    wanted = window_nll(exact, WINDOWS.ids)
    assert torch.equal(window_nll(model, WINDOWS.ids), wanted)


@pytest.mark.parametrize("damage", ["none", "half"])
def test_scales_of_four_bits_that_do_not_fit(
    in_fp4: tuple[Path, Path], damage: str
) -> None:
    """They are refused before anything is written, also where they could divide."""
    with changed_tensors(in_fp4[0]) as tensors:
        (name,) = (n for n in tensors if "layers.1.ffn.experts.2.w2.scale" in n)
        scale = tensors.pop(name)
        if damage == "half":
            tensors[name] = scale[::2]
    message = "scale" if damage == "none" else "expected 32 x 1 for blocks of 1 x 32"
    check_refused(in_fp4[0], message)


def refused(kind: str, folder: Path) -> None:
    """Check that any way to open a model names the format and says what to do."""
    message = rf"{re.escape(kind)}'.*that is not quantised, prune it, and quantise"
    check_refused(folder, message)
    with pytest.raises(SpecError, match=message):
        plan(folder)


def test_a_format_of_the_model_within_a_wrapper_is_refused(tmp_path: Path) -> None:
    """It is named as in published wrappers: in the language model's configuration."""
    write_folder(tmp_path, tiny_wrapper("qwen3_vl_moe"))
    with changed_json(tmp_path) as config:
        config["text_config"]["quantization_config"] = {"quant_method": "awq"}
    refused("awq", tmp_path)


@pytest.mark.parametrize("kind", ["awq", "gptq", "bitsandbytes"])
def test_other_formats_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """The error says what to do, whether layers would be streamed or not."""
    write_folder(tmp_path / "dense", tiny_model("qwen3_moe"))
    configure(tmp_path / "dense", quant_method=kind, bits=4)
    refused(kind, tmp_path / "dense")
    text = "--corpus", write_text(tmp_path / "text.txt"), *TINY
    base = "prune", tmp_path / "dense", "--ratio", 0.5, "--out", tmp_path / "pruned"
    for options in ((), ("--method", "paper")):
        message = one_line(*base, *options, *text)
        assert f"{kind!r}" in message
        assert "take the checkpoint that is not quantised" in message


# --- NVFP4, in both layouts, every number read by itself --------------------------

EXPERT = "model.layers.1.mlp.experts.2.down_proj"


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A checkpoint, and the same in floats."""
    place = tmp_path_factory.mktemp(request.param)
    model = tiny_model(
        "qwen3_moe",
        dtype=torch.float32,
        hidden_size=32,
        moe_intermediate_size=32,
        vocab_size=D_VOCAB + 2,
    )
    write_folder(place / "exact", model)
    shutil.copytree(place / "exact", place / "nvfp4")
    numbers = in_nvfp4(place / "nvfp4", request.param)
    assert f"{EXPERT}.weight" in numbers
    assert any("self_attn" in name for name in numbers)
    with changed_tensors(place / "exact") as tensors:
        tensors |= {name: tensor.float() for name, tensor in numbers.items()}
    return place / "nvfp4", place / "exact"


@pytest.mark.parametrize("stream", [True, False])
def test_the_weights_are_the_numbers_times_both_scales(
    pair: tuple[Path, Path], stream: bool
) -> None:
    """In float32, for experts and all others; what was not quantised is unchanged."""
    exact, _ = load_model(pair[1], device="cpu", dtype="float32", stream=False)
    model, _ = load_model(pair[0], device="cpu", dtype="float32", stream=stream)
    weights = weights_of(model)
    for name, tensor in exact.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_pruned_model_is_in_bfloat16(
    pair: tuple[Path, Path], stream: bool, tmp_path: Path
) -> None:
    """By itself it is streamed; the card says what it was."""
    model, _ = load_model(
        pair[0], device="cpu", dtype="bfloat16", stream="auto" if stream else False
    )
    assert (stream_of(model) is not None) == stream
    keep = random_keep(model)
    folder = save_pruned(prune(model, keep), tmp_path / "out", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in tensors_in(folder).values()} == {torch.bfloat16}
    load_model(folder, device="cpu", stream=False)
    assert "dequantised from nvfp4 to bfloat16" in (folder / "README.md").read_text()


@pytest.mark.parametrize("stream", [True, False])
def test_settings_beside_config_json_are_read(stream: bool, tmp_path: Path) -> None:
    """Folders of modelopt may have them in a file of their own, with any format."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "vocab_size": D_VOCAB + 2}
    write_folder(tmp_path, tiny_model("qwen3_moe", dtype=torch.float32, **sizes))
    numbers = in_nvfp4(tmp_path, "modelopt")
    with changed_json(tmp_path) as config:
        del config["quantization_config"]
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    model, _ = load_model(tmp_path, device="cpu", dtype="float32", stream=stream)
    weights = weights_of(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(weights[name], numbers[name].float())
    needs = plan(tmp_path)
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(SpecError, match=r"modelopt \(FP8\)'"):
        plan(tmp_path)
    assert needs.engine
    with pytest.raises(SpecError, match=r"modelopt \(FP8\)'.*quantise the result"):
        load_model(tmp_path, device="cpu", stream=stream)
    beside.write_text("[")
    for read in (plan, read_config):
        with pytest.raises(SpecError, match=r"hf_quant_config\.json.*it is damaged"):
            read(tmp_path)


def test_a_plan_counts_numbers(pair: tuple[Path, Path]) -> None:
    """It counts neither bytes nor scales, and says that the model is streamed."""
    nvfp4, exact = plan(pair[0]), plan(pair[1])
    assert nvfp4.n_parameters == exact.n_parameters
    assert "nvfp4: they are dequantised" in nvfp4.why


@pytest.mark.parametrize("damage", ["none", "last", "grid"])
def test_scales_that_do_not_fit(
    damage: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """They are refused; streamed, or pruned from files, before anything is done."""
    folder = Path(shutil.copytree(pair[0], tmp_path / "nvfp4"))
    with changed_tensors(folder) as tensors:
        if damage == "grid":
            scale = tensors[f"{EXPERT}.weight_scale"]
            tensors[f"{EXPERT}.weight_scale"] = scale[:, :1]
        else:
            ends = ("_scale",) if damage == "none" else ("_scale_2", "_global_scale")
            for end in ends:
                tensors.pop(f"{EXPERT}.weight{end}", None)
    check_refused(
        folder, "32 x 2 for blocks of 1 x 16" if damage == "grid" else "scale"
    )


GROUP = {"config_groups": {"group_0": {"format": "pack-quantized"}}}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
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
def test_other_layouts_are_refused_by_name(
    settings: dict[str, object], name: str, tmp_path: Path
) -> None:
    """The message says what to do."""
    assert format_of(settings) == name
    write_folder(tmp_path, tiny_model("qwen3_moe"))
    configure(tmp_path, **settings)
    message = f"format {re.escape(repr(name))}.*prune it, and quantise the result"
    check_refused(tmp_path, message)
