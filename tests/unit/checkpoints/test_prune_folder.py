"""A folder is pruned a layer at a time: its files are those of the pruned model."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from families import tiny_model
from heard import Heard, stop_at
from keeps import check_masked, random_keep, widths_keep
from processes import run_each
from safetensors.torch import load_file
from stored_tensors import (
    INDEX,
    SINGLE,
    changed_json,
    changed_tensors,
    same_tensors,
    source_of,
    tensors_in,
    written_at,
)
from transformers import AutoModelForCausalLM, GenerationConfig

from heapr_lab import KeepMask, prune, save_pruned
from heapr_lab.checkpoints.folder import partial_of
from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.errors import CacheError, LayoutError, SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.streaming.opening import open_streamed

FAMILIES = (
    "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v4", "glm4_moe",
    "gpt_oss", "granitemoe", "nemotron_h", "qwen3_5_moe_text",
)  # fmt: skip
"""Every layout of experts; and one that is not streamed where it runs."""


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_those_of_the_pruned_model(family, tmp_path):
    """A file for each part, which is counted, and an index with each tensor's place."""
    model, source = source_of(tmp_path, family)
    keep, told = random_keep(model), Heard()
    out = prune_folder(source, keep, tmp_path / "out", progress=told)
    same_tensors(out, save_pruned(prune(model, keep), tmp_path / "expected"))
    index, tensors = json.loads((out / INDEX).read_text()), tensors_in(out)
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        assert name in load_file(out / file)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    n_parts = len({*index["weight_map"].values()})
    assert told == [(done, n_parts) for done in range(1, n_parts + 1)]
    assert not list(out.glob(".*"))
    check_masked(out, model, keep)


@pytest.mark.parametrize(
    ("family", "old", "new", "fused"),
    [
        ("granitemoe", "model.", "", False),
        ("qwen3_5_moe_text", "model.", "model.language_model.", False),
        ("qwen3_5_moe_text", "model.", "model.language_model.", True),
        ("mixtral", ".block_sparse_moe.", ".mlp.", False),
    ],
)
def test_other_names_that_transformers_loads(family, old, new, fused, tmp_path):
    """A prefix less or more, or names of a later version, are read as well.

    Fused experts are saved as a model that was loaded from them would save them.
    """
    model, source = source_of(tmp_path, family)
    model.save_pretrained(source, save_original_format=not fused)
    with changed_tensors(source) as tensors:
        before = [*tensors]
        for name in before:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)
    assert before != [*tensors]
    keep = random_keep(model)
    out = prune_folder(source, keep, tmp_path / "out")
    check_masked(out, model, keep)
    if fused:
        assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
        same_tensors(out, save_pruned(prune(loaded, keep), tmp_path / "expected"))


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
@pytest.mark.parametrize("named", [True, False])
def test_every_tensor_keeps_its_type_and_bits(structure, named, tmp_path):
    """The files have several types; config.json may name none."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    source = tmp_path / "source"
    model.save_pretrained(source)
    wide = ("layers.0.input_layernorm.weight", "layers.1.mlp.experts.2.up_proj.weight")
    with changed_tensors(source) as tensors:
        for name in [name for name in tensors if name.endswith(wide)]:
            tensors[name] = tensors[name].float() * 1.001
    with changed_json(source) as config:
        assert config["dtype"] == "bfloat16"
        if not named:
            del config["dtype"]
    keep = widths_keep(model, 8, structure=structure)
    written = tensors_in(prune_folder(source, keep, tmp_path / "out"))
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        joined = "layers.1.mlp.experts" in name and "down_proj" not in name
        assert written[name].dtype == (torch.float32 if joined else tensor.dtype), name
        assert torch.equal(written[name].to(tensor.dtype), tensor), name
    again = json.loads((tmp_path / "out" / "config.json").read_text())
    assert again["dtype"] == "bfloat16"


def test_settings_of_generation_are_kept(tmp_path):
    """They are those of a model that is loaded, and saved."""
    model, source = source_of(tmp_path)
    GenerationConfig(do_sample=True, top_p=0.5, eos_token_id=7).save_pretrained(source)
    out = prune_folder(source, random_keep(model), tmp_path / "out")
    settings, expected = map(GenerationConfig.from_pretrained, (out, source))
    assert settings == expected


MEASURED = """
import sys
from pathlib import Path
from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.models.folders import read_config, skeleton_of
from heapr_lab.pruning.masks import KeepMask
folder = Path({folder!r})
skeleton_of(read_config(folder / "source"))
keep = KeepMask.read(folder / "keep.parquet")
status = Path("/proc/self/status")
peak = lambda: 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
Path("/proc/self/clear_refs").write_text("5")  # what is resident now is the peak
before = peak()
prune_folder(folder / "source", keep, folder / "out")
sys.stdout.write(str(peak() - before))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not on Linux")
def test_memory_holds_a_layer(tmp_path):
    """The peak grows by less than half of the file, which has eight layers."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 2048}
    sizes |= {"num_hidden_layers": 8, "dtype": torch.bfloat16}
    model = tiny_model("qwen3_moe", **sizes)
    model.save_pretrained(tmp_path / "source")
    n_bytes = (tmp_path / "source" / SINGLE).stat().st_size
    assert n_bytes > 200e6
    random_keep(model).write(tmp_path / "keep.parquet")
    printed = run_each(MEASURED.format(folder=str(tmp_path)))
    assert float(printed) < n_bytes / 2


# --- interrupted ------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path) -> tuple[Path, Any, Path]:
    """A source, its model, and the one file that an interrupted pruning finished."""
    model, source = source_of(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        prune_folder(source, random_keep(model), tmp_path / "out", progress=stop_at(1))
    (finished,) = partial_of(tmp_path / "out").glob("*.safetensors")
    return source, model, finished


@pytest.mark.parametrize("text", ["[]", "7", "{"])
@pytest.mark.parametrize("name", [".partial-plan.json", ".partial-written.json"])
def test_a_damaged_note_of_what_is_finished(name, text, begun, tmp_path):
    """It is named, and no finished file is lost."""
    source, model, first = begun
    (first.parent / name).write_text(text)
    with pytest.raises(CacheError, match=name):
        prune_folder(source, random_keep(model), tmp_path / "out")
    assert first.is_file()


def test_an_unfinished_folder_belongs_to_mask_structure_and_source(begun, tmp_path):
    """Another one is refused before a file is changed."""
    (source, model, first), out = begun, tmp_path / "out"
    before = {path: path.read_bytes() for path in first.parent.iterdir()}
    uniform = widths_keep(model, 4, structure="uniform")
    with pytest.raises(CacheError, match="another mask and structure: choose another"):
        prune_folder(source, uniform, out)
    with pytest.raises(CacheError, match="of another mask: choose another folder"):
        prune_folder(source, random_keep(model, seed=1), out)
    file = next(source.glob("*.safetensors"))
    file.write_bytes(file.read_bytes())
    with pytest.raises(CacheError, match="of another source: choose another folder"):
        prune_folder(source, random_keep(model), out)
    assert {path: path.read_bytes() for path in first.parent.iterdir()} == before


def test_the_last_check_is_run_again_without_writing(tmp_path):
    """It takes long; files that were finished before it was interrupted are kept."""
    (model, source), out = source_of(tmp_path), tmp_path / "out"
    check = Mock(side_effect=[KeyboardInterrupt, {}])
    with pytest.raises(KeyboardInterrupt):
        prune_folder(source, random_keep(model), out, check=check)
    before = written_at(partial_of(out))
    prune_folder(source, random_keep(model), out, check=check)
    assert check.call_count == 2
    assert written_at(out) == before != {}


def test_compensated_weights_are_not_resumed(tmp_path):
    """What replaces W_down is not told by the mask: nothing is left to go on from."""
    model, source = source_of(tmp_path)
    keep = random_keep(model)
    down_projs = {k.layer: k.down.detach() * 2 for k in find_experts(model)}
    dense = open_streamed(source, dtype=torch.float32, device=torch.device("cpu"))
    pruned = prune(dense, keep, down_projs=down_projs)
    with pytest.raises(KeyboardInterrupt):
        save_pruned(pruned, tmp_path / "out", progress=stop_at(1))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- what is refused --------------------------------------------------------------


LAST = "model.layers.1.mlp.experts.2.up_proj.weight"
SCALES = f"{LAST}_scale_inv"
BIAS = "model.layers.1.mlp.experts.down_proj_bias"
UP = "model.layers.1.mlp.experts.gate_up_proj"
OTHER = torch.ones(8, 16)
EIGHT_BITS = OTHER.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("family", "name", "new", "message"),
    [
        ("qwen3_moe", LAST, None, f"lacks 1 of its weights .{UP}"),
        ("gpt_oss", BIAS, None, r"lacks 1 of its weights .*layers\.1.*down_proj_bias"),
        ("qwen3_moe", LAST, EIGHT_BITS, f"{LAST} \\(F8_E4M3 .* has no .*_scale_inv"),
        (
            "granitemoe",
            "model.layers.0.block_sparse_moe.output_linear.weight",
            torch.zeros(3, 16, 8),
            r"has in other shapes 1 of its weights .*layers\.0.*down_proj",
        ),
        # It is joined with others: the first of them is named, and both shapes.
        ("qwen3_moe", LAST, OTHER[:3], r"\.0\.gate_proj.* \[8, 16\] .* \[3, 16\]"),
        ("qwen3_moe", SCALES, OTHER, f"json does not, 1 .*{SCALES}"),
        ("qwen3_moe", f"{UP}_blocks", OTHER, "1 of its weights"),
        ("qwen3_moe", LAST.replace(".2.", ".4."), OTHER, f"lacks 1 .*{UP}"),
        ("qwen3_moe", LAST.replace(".2.", ".02."), OTHER, f"lacks 1 .*{UP}"),
    ],
)
def test_experts_that_are_not_those_of_the_model(family, name, new, message, tmp_path):
    """Missing, quantised, of another shape, packed, one too many, one twice.

    They are named, and nothing is written.
    """
    model, source = source_of(tmp_path, family)
    with changed_tensors(source) as tensors:
        tensors.pop(name, None)
        tensors |= {} if new is None else {name: new}
    with pytest.raises(LayoutError, match=message):
        prune_folder(source, random_keep(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mask_of_several_widths_where_one_is_needed(tmp_path):
    """It is refused, and nothing is written."""
    model, source = source_of(tmp_path)
    keep = KeepMask(random_keep(model).arrays, {"structure": "uniform"})
    with pytest.raises(SpecError, match="keep 0 to 8 atoms, a uniform checkpoint"):
        prune_folder(source, keep, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
