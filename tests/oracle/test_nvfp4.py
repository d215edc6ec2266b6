"""NVFP4 checkpoints in both layouts, against every number read by itself."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from families import tiny_model
from keeps import random_keep
from quantised_folder import LAYOUTS, configure, in_nvfp4
from stored_tensors import changed_json, changed_tensors, tensors_in
from tiny_folder import D_VOCAB, write_tokenizer

from heapr_lab.checkpoints.save import prune_folder, save_pruned
from heapr_lab.errors import HeaprLabError, LayoutError, SpecError
from heapr_lab.models.dtypes import format_of
from heapr_lab.models.folders import read_config
from heapr_lab.models.loading import load_model
from heapr_lab.pruning.surgery import prune
from heapr_lab.streaming.plan import plan
from heapr_lab.streaming.stream import stream_of

EXPERT = "model.layers.1.mlp.experts.2.down_proj"


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def quantised(
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
    model.save_pretrained(place / "exact")
    write_tokenizer(place / "exact")
    shutil.copytree(place / "exact", place / "nvfp4")
    numbers = in_nvfp4(place / "nvfp4", request.param)
    assert f"{EXPERT}.weight" in numbers
    assert any("self_attn" in name for name in numbers)
    with changed_tensors(place / "exact") as tensors:
        tensors |= {name: tensor.float() for name, tensor in numbers.items()}
    return place / "nvfp4", place / "exact"


@pytest.mark.parametrize("stream", [True, False])
def test_the_weights_are_the_numbers_times_both_scales(
    quantised: tuple[Path, Path], stream: bool
) -> None:
    """In float32, for experts and all others; what was not quantised is unchanged."""
    exact, _ = load_model(quantised[1], device="cpu", dtype="float32", stream=False)
    model, _ = load_model(quantised[0], device="cpu", dtype="float32", stream=stream)
    reader = stream_of(model)
    weights = model.state_dict() if reader is None else dict(reader.each(torch.clone))
    for name, tensor in exact.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_pruned_model_is_in_bfloat16(
    quantised: tuple[Path, Path], stream: bool, tmp_path: Path
) -> None:
    """By itself it is streamed; the card says what it was."""
    model, _ = load_model(
        quantised[0], device="cpu", dtype="bfloat16", stream="auto" if stream else False
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
    tiny_model("qwen3_moe", dtype=torch.float32, **sizes).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    numbers = in_nvfp4(tmp_path, "modelopt")
    with changed_json(tmp_path) as config:
        del config["quantization_config"]
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    model, _ = load_model(tmp_path, device="cpu", dtype="float32", stream=stream)
    reader = stream_of(model)
    weights = model.state_dict() if reader is None else dict(reader.each(torch.clone))
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


def test_a_plan_counts_numbers(quantised: tuple[Path, Path]) -> None:
    """It counts neither bytes nor scales, and says that the model is streamed."""
    nvfp4, exact = plan(quantised[0]), plan(quantised[1])
    assert nvfp4.n_parameters == exact.n_parameters
    assert "nvfp4: they are dequantised" in nvfp4.why


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("damage", ["none", "last", "grid"])
def test_scales_that_do_not_fit(
    damage: str, stream: bool, quantised: tuple[Path, Path], tmp_path: Path
) -> None:
    """They are refused; streamed, or pruned from files, before anything is done."""
    folder = shutil.copytree(quantised[0], tmp_path / "nvfp4")
    with changed_tensors(folder) as tensors:
        if damage == "grid":
            scale = tensors[f"{EXPERT}.weight_scale"]
            tensors[f"{EXPERT}.weight_scale"] = scale[:, :1]
        else:
            ends = ("_scale",) if damage == "none" else ("_scale_2", "_global_scale")
            for end in ends:
                tensors.pop(f"{EXPERT}.weight{end}", None)
    message = r"32 x 2 for blocks of 1 x 16" if damage == "grid" else "scale"
    with pytest.raises(HeaprLabError, match=message):
        load_model(folder, device="cpu", stream=stream)
    keep = random_keep(tiny_model("qwen3_moe", moe_intermediate_size=32))
    with pytest.raises(LayoutError, match=message):
        prune_folder(folder, keep, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["nvfp4"]


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
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    configure(tmp_path, **settings)
    with pytest.raises(SpecError) as caught:
        load_model(tmp_path, device="cpu")
    assert f"format {name!r}" in str(caught.value)
    assert "prune it, and quantise the result" in str(caught.value)
