"""Files sliced one tensor at a time are those that the pruned model would save."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from heapr_lab.checkpoints import slice_files as shards
from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.checkpoints.slice_files import PROGRESS_NAME
from heapr_lab.checkpoints.uniform import skeleton_of, stock_config
from heapr_lab.errors import CacheError, LayoutError, SpecError
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
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def uniform_keep(model: nn.Module, *, width: int = WIDTH) -> KeepMask:
    """A random mask that keeps `width` atoms of every expert."""
    rng = np.random.default_rng(0)
    arrays = {
        layer: rng.random(kept.shape).argsort(axis=1) < width
        for layer, kept in random_keep(model).arrays.items()
    }
    return KeepMask(arrays, {"structure": "uniform"})


def source_of(
    folder: Path, family: str = "qwen3_moe", *, max_shard_size: str = "5GB"
) -> tuple[Any, Path]:
    """A tiny model, and the folder it is saved in."""
    model = tiny_model(family, dtype=torch.float32)
    model.save_pretrained(folder / "source", max_shard_size=max_shard_size)
    return model, folder / "source"


def slice_files(
    source: Path, skeleton: nn.Module, keep: KeepMask, out: Path, **kwargs: Any
) -> Path:
    """`out`, where the files of `source` are sliced, as the checksums say."""
    checksums = shards.slice_files(source, skeleton, keep, out, **kwargs)
    files = {path.name: path for path in out.glob("*.safetensors")}
    hashes = {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in files.items()}
    assert checksums == hashes
    return out


def sliced(model: Any, source: Path, out: Path, **kwargs: Any) -> Path:
    """The files of `source`, sliced with a random mask."""
    return slice_files(
        source, skeleton_of(model.config), random_keep(model), out, **kwargs
    )


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the safetensors files in a folder; each name is there once."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert len(found) == sum(map(len, files))
    return found


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


def change(
    source: Path, name: str, new: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Replace a tensor of a single file, or delete it."""
    tensors = load_file(source / SINGLE)
    tensor = new(tensors.pop(name))
    if tensor is not None:
        tensors[name] = tensor.contiguous()
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})


# --- what is written --------------------------------------------------------------


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
    narrow = stock_config(model.config, WIDTH)
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
from heapr_lab.checkpoints.uniform import skeleton_of
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


# --- interruptions ----------------------------------------------------------------


class StopError(Exception):
    """What interrupts."""


def interrupted(model: Any, source: Path, out: Path) -> Path:
    """The first file in `out`, which was left in the second one."""
    first = sorted(path.name for path in source.glob("*.safetensors"))[0]

    def stop(*_counts: int) -> None:
        if (out / first).exists():
            raise StopError

    with pytest.raises(StopError):
        sliced(model, source, out, progress=stop)
    return out / first


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """A finished shard is not written again, and the end is the same."""
    model, source = source_of(tmp_path, max_shard_size="9KB")
    out = tmp_path / "out"
    first = interrupted(model, source, out)
    assert sorted(path.name for path in out.iterdir()) == [PROGRESS_NAME, first.name]
    modified = first.stat().st_mtime_ns
    sliced(model, source, out)
    assert first.stat().st_mtime_ns == modified
    sliced(model, source, tmp_path / "expected")
    names = sorted(path.name for path in out.iterdir())
    assert names == sorted(path.name for path in source.glob("model*"))
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_a_shard_cut_short_is_written_again(tmp_path: Path) -> None:
    """Its size tells."""
    model, source = source_of(tmp_path, max_shard_size="9KB")
    first = interrupted(model, source, tmp_path / "out")
    whole = first.read_bytes()
    first.write_bytes(whole[:-4])
    sliced(model, source, tmp_path / "out")
    assert first.read_bytes() == whole


def test_an_unfinished_folder_belongs_to_mask_and_source(tmp_path: Path) -> None:
    """Another mask, or a changed source, is refused."""
    model, source = source_of(tmp_path, max_shard_size="9KB")
    out, skeleton = tmp_path / "out", skeleton_of(model.config)
    interrupted(model, source, out)
    with pytest.raises(CacheError, match="of another mask: choose another folder"):
        slice_files(source, skeleton, random_keep(model, seed=1), out)
    file = next(source.glob("*.safetensors"))
    file.write_bytes(file.read_bytes())
    with pytest.raises(CacheError, match="of another source: choose another folder"):
        sliced(model, source, out)


def test_other_weights_in_the_folder_are_refused(tmp_path: Path) -> None:
    """They would be loaded with, or instead of, the sliced ones."""
    model, source = source_of(tmp_path)
    with pytest.raises(SpecError, match="is the source itself"):
        sliced(model, source, source)
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(CacheError, match=r"other weights \(model-00001-of-00002"):
        sliced(model, source, out)


# --- what cannot be sliced --------------------------------------------------------

LAST = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("family", "name", "new", "message"),
    [
        ("qwen3_moe", LAST, lambda _: None, f"1 of the 8 parts .* first is {LAST}"),
        (
            "gpt_oss",
            "model.layers.1.mlp.experts.down_proj_bias",
            lambda _: None,
            r"lacks 4 of the 4 parts .*experts\.0\.down_proj\.bias",
        ),
        (
            "qwen3_moe",
            LAST,
            lambda t: t.to(torch.float8_e4m3fn),
            f"{LAST} \\(F8_E4M3 .* is quantised, expected one of F16",
        ),
        (
            "qwen3_moe",
            LAST,
            lambda t: t[:3],
            r"F32 \(3, 16\)\) has 192 bytes, the model expects \(8, 16\) and 512",
        ),
        (
            "granitemoe",
            "model.layers.0.block_sparse_moe.output_linear.weight",
            lambda t: t[:3],
            r"expects \(4, 16, 8\) and 2048: it is of another model",
        ),
    ],
)
def test_experts_that_are_not_those_of_the_model(
    family: str, name: str, new: Any, message: str, tmp_path: Path
) -> None:
    """Missing, quantised or of another shape: named, and nothing is written."""
    model, source = source_of(tmp_path, family)
    change(source, name, new)
    with pytest.raises(LayoutError, match=message):
        sliced(model, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            f"{LAST}_scale_inv",
            "none of their weights and biases, so they are quantised",
        ),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "they are quantised"),
        (LAST.replace(".2.", ".4."), "expert 4 .* expected none beside expert 3"),
        ("model.layers.1.mlp.experts.02.up_proj.weight", "expected none beside .*2.up"),
    ],
)
def test_tensors_that_experts_do_not_have(
    name: str, message: str, tmp_path: Path
) -> None:
    """Scales, packed blocks, an expert too many, an expert twice."""
    model, source = source_of(tmp_path)
    tensors = load_file(source / SINGLE)
    save_file(tensors | {name: tensors[LAST].clone()}, source / SINGLE)
    with pytest.raises(LayoutError, match=message):
        sliced(model, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def cut_short(source: Path) -> None:
    """Lose the end of the second file."""
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])


def cut_in_header(source: Path) -> None:
    """Keep less than the header of the second file."""
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:100])


def without_shard(source: Path) -> None:
    """Delete the second file."""
    sorted(source.glob("*.safetensors"))[1].unlink()


def without_index(source: Path) -> None:
    """Delete the index."""
    (source / INDEX).unlink()


def with_half_index(source: Path) -> None:
    """Keep half of the index."""
    text = (source / INDEX).read_text()
    (source / INDEX).write_text(text[: len(text) // 2])


def with_stray_name(source: Path) -> None:
    """Let the index name a tensor that is nowhere."""
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["lost"] = sorted(index["weight_map"].values())[0]
    (source / INDEX).write_text(json.dumps(index))


def with_tensor_twice(source: Path) -> None:
    """Add a tensor of the first file to the second."""
    first, second = sorted(source.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)


def with_unknown_type(source: Path) -> None:
    """Let a tensor have a type of the future."""
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F99"', 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, r"model-00002.* has \d+ bytes, its header says \d+ .*not whole"),
        (cut_in_header, r"model-00002.*\(100 bytes\) has no whole safetensors header"),
        (
            without_shard,
            r"index.json names model-00002.* for .*, but there is no such file",
        ),
        (without_index, "has neither model.safetensors nor model.safetensors.index"),
        (with_half_index, "index.json has no whole weight_map: download it again"),
        (with_stray_name, r"lacks lost, which model.safetensors.index.json says"),
        (
            with_tensor_twice,
            r"is in .*model-00002.* and in model-00001.* expected it once",
        ),
        (with_unknown_type, r"model-00002.*of an unknown type \(F99\)"),
    ],
)
def test_incomplete_sources(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    """The file and the tensor are named, and nothing is written."""
    model, source = source_of(tmp_path, max_shard_size="9KB")
    damage(source)
    with pytest.raises(SpecError, match=message):
        sliced(model, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_masks_of_other_models(tmp_path: Path) -> None:
    """Of other layers, other sizes, or of different widths where one is needed."""
    model, source = source_of(tmp_path)
    out, skeleton = tmp_path / "out", skeleton_of(model.config)
    keep = random_keep(model)
    other = KeepMask({0: keep.by_layer(0)})
    with pytest.raises(SpecError, match=r"layers \[0\], the model's .* \[0, 1\]"):
        slice_files(source, skeleton, other, out)
    narrow = KeepMask({k: kept[:, :5] for k, kept in keep.arrays.items()})
    with pytest.raises(SpecError, match=r"shape \(4, 5\), expected \(4, 8\)"):
        slice_files(source, skeleton, narrow, out)
    with pytest.raises(SpecError, match="keep 0 to 8 atoms, a uniform checkpoint"):
        slice_files(source, skeleton, keep, out, stacked=True)
    assert not out.exists()
