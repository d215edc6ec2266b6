"""Files sliced one tensor at a time are those that the pruned model would save."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_ids
from keeps import logits_of, random_keep
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sliced_files import INDEX, SINGLE, slice_files, sliced, source_of, tensors_in
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.checkpoints.uniform import stock_config
from heapr_lab.models.folders import skeleton_of
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import masking, prune

FAMILIES = (
    "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "glm4_moe", "gpt_oss",
    "granitemoe", "nemotron_h", "qwen3_5_moe_text",
)  # fmt: skip


IDS = tiny_ids()
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
"""Float32, and other orders of summation in sliced and masked experts."""
WIDTH = 4


def uniform_keep(model: nn.Module, *, width: int = WIDTH) -> KeepMask:
    """A random mask that keeps `width` atoms of every expert."""
    rng = np.random.default_rng(0)
    arrays = {
        layer: rng.random(kept.shape).argsort(axis=1) < width
        for layer, kept in random_keep(model).arrays.items()
    }
    return KeepMask(arrays, {"structure": "uniform"})


def assert_same_tensors(found: Path, expected: Path) -> None:
    """Same names, types, shapes and bits."""
    ours, theirs = tensors_in(found), tensors_in(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def assert_same_model(found: Path, expected: Path, logits: torch.Tensor) -> None:
    """The files `found` give `logits` with the other files of `expected`."""
    for path in expected.iterdir():
        if not path.name.startswith("model"):
            (found / path.name).write_bytes(path.read_bytes())
    loaded = AutoModelForCausalLM.from_pretrained(found, dtype="float32")
    torch.testing.assert_close(logits_of(loaded, IDS), logits, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_file_is_that_of_the_pruned_model(family: str, tmp_path: Path) -> None:
    """Byte for byte, header included; and it loads as the masked model."""
    model, source = source_of(tmp_path, family)
    keep = random_keep(model)
    out = slice_files(source, skeleton_of(model.config), keep, tmp_path / "out")
    expected = save_pruned(prune(model, keep), tmp_path / "expected")
    assert [path.name for path in out.iterdir()] == [SINGLE]
    assert (out / SINGLE).read_bytes() == (expected / SINGLE).read_bytes()
    with masking(model, keep):
        assert_same_model(out, expected, logits_of(model, IDS))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe", "nemotron_h"])
def test_shards_hold_the_tensors_of_the_pruned_model(
    family: str, tmp_path: Path
) -> None:
    """In files named as in the source, with an index that says where each is."""
    model, source = source_of(tmp_path, family, max_shard_size="9KB")
    keep = random_keep(model)
    out = slice_files(source, skeleton_of(model.config), keep, tmp_path / "out")
    expected = save_pruned(prune(model, keep), tmp_path / "expected")
    names = sorted(path.name for path in source.glob("model*"))
    assert sorted(path.name for path in out.iterdir()) == names
    assert len(names) > 3
    assert_same_tensors(out, expected)
    index, tensors = json.loads((out / INDEX).read_text()), tensors_in(out)
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    total_bytes = sum(t.nbytes for t in tensors.values())
    n_parameters = sum(p.numel() for p in prune(model, keep).parameters())
    assert index["metadata"]["total_size"] == total_bytes
    assert index["metadata"]["total_parameters"] == n_parameters
    with masking(model, keep):
        assert_same_model(out, expected, logits_of(model, IDS))


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("qwen3_moe", "moe_intermediate_size"),
        ("gpt_oss", "intermediate_size"),
        ("granitemoe", "intermediate_size"),
    ],
)
def test_stacked_files_are_a_stock_model(
    family: str, setting: str, tmp_path: Path
) -> None:
    """Only narrower, under the names that the tensors had."""
    model, source = source_of(tmp_path, family)
    keep, skeleton = uniform_keep(model), skeleton_of(model.config)
    out = slice_files(source, skeleton, keep, tmp_path / "out", stacked=True)
    assert tensors_in(out).keys() == tensors_in(source).keys()
    narrow = stock_config(model.config, WIDTH).config
    assert getattr(narrow, setting) == WIDTH
    narrow.save_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="float32")
    with masking(model, keep):
        torch.testing.assert_close(
            logits_of(loaded, IDS), logits_of(model, IDS), **CLOSE
        )


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("granitemoe", "model.", ""),
        ("qwen3_5_moe_text", "model.", "model.language_model."),
        ("mixtral", ".block_sparse_moe.", ".mlp."),
    ],
)
def test_other_names_that_transformers_loads(
    family: str, old: str, new: str, tmp_path: Path
) -> None:
    """A prefix less or more, or names of a later version, are sliced as well."""
    model, source = source_of(tmp_path, family)
    tensors = load_file(source / SINGLE)
    renamed = {name.replace(old, new, 1): tensors[name] for name in tensors}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, source / SINGLE, metadata={"format": "pt"})
    keep = random_keep(model)
    out = slice_files(source, skeleton_of(model.config), keep, tmp_path / "out")
    expected = save_pruned(prune(model, keep), tmp_path / "expected")
    with masking(model, keep):
        assert_same_model(out, expected, logits_of(model, IDS))


def test_fused_names_under_a_prefix_keep_it(tmp_path: Path) -> None:
    """As a model that was loaded from them would save its experts."""
    model, source = source_of(tmp_path, "qwen3_5_moe_text")
    model.save_pretrained(source, save_original_format=False)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(source / SINGLE).items()
    }
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})
    keep = random_keep(model)
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    out = slice_files(source, skeleton_of(model.config), keep, tmp_path / "out")
    expected = save_pruned(prune(loaded, keep), tmp_path / "expected")
    assert_same_tensors(out, expected)
    with masking(model, keep):
        assert_same_model(out, expected, logits_of(model, IDS))


def test_what_is_not_of_experts_is_copied(tmp_path: Path) -> None:
    """Whatever its type, shape and name, in the order of safetensors' own writer."""
    model, source = source_of(tmp_path)
    names = (
        "bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu",
        "int16", "float16", "bfloat16", "int32", "complex64", "float64", "int64",
    )  # fmt: skip
    extra = {
        f"läyer.{name}": torch.ones(16, dtype=torch.uint8).view(getattr(torch, name))
        for name in names
    }
    extra["scalar"], extra["empty"] = torch.tensor(3.0), torch.empty(0, 7)
    tensors = load_file(source / SINGLE) | extra
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})
    out = sliced(model, source, tmp_path / "out")
    found = load_file(out / SINGLE)
    assert found.keys() == tensors.keys()
    save_file(found, tmp_path / "again", metadata={"format": "pt"})
    assert (out / SINGLE).read_bytes() == (tmp_path / "again").read_bytes()
    for name, tensor in extra.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        ours, own = (t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(ours, own)


def test_progress_ends_at_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    """And never falls."""
    model, source = source_of(tmp_path, max_shard_size="9KB")
    calls: list[tuple[int, int]] = []
    out = sliced(
        model, source, tmp_path / "out", progress=lambda *counts: calls.append(counts)
    )
    total = sum(t.nbytes for t in tensors_in(out).values())
    assert {n_bytes for _, n_bytes in calls} == {total}
    done = [n_bytes for n_bytes, _ in calls]
    assert done == sorted(done)
    assert done[-1] == total


def test_memory_holds_a_few_tensors(tmp_path: Path) -> None:
    """The peak grows by far less than the 100 MB of the file."""
    d_model, d_inter, n_experts = 512, 1024, 32
    shapes = {
        "gate_proj": (d_inter, d_model),
        "up_proj": (d_inter, d_model),
        "down_proj": (d_model, d_inter),
    }
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": torch.zeros(
            shape, dtype=torch.bfloat16
        )
        for layer in range(1)
        for expert in range(n_experts)
        for name, shape in shapes.items()
    }
    config = AutoConfig.for_model(
        "qwen3_moe",
        num_experts=n_experts,
        num_hidden_layers=1,
        hidden_size=d_model,
        moe_intermediate_size=d_inter,
        num_attention_heads=4,
        vocab_size=64,
    )
    config.save_pretrained(tmp_path / "source")
    skeleton = skeleton_of(config)
    tensors |= {
        name: torch.zeros(weight.shape, dtype=torch.bfloat16)
        for name, weight in skeleton.state_dict().items()
        if ".experts." not in name
    }
    save_file(tensors, tmp_path / "source" / SINGLE)
    assert (tmp_path / "source" / SINGLE).stat().st_size > 100e6
    random_keep(skeleton).write(tmp_path / "keep.parquet")
    code = """
import resource, sys
from pathlib import Path
from transformers import AutoConfig
from heapr_lab.models.experts import find_experts
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.checkpoints.slice_files import slice_files
from heapr_lab.models.folders import skeleton_of
folder = Path(sys.argv[1])
skeleton = skeleton_of(AutoConfig.from_pretrained(folder / "source"))
keep = KeepMask.read(folder / "keep.parquet")
find_experts(skeleton)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
slice_files(folder / "source", skeleton, keep, folder / "out")
sys.stdout.write(str(peak() - before))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 15
