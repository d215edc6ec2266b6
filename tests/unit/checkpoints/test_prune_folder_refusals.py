"""Sources and masks that do not fit are named, and nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from keeps import random_keep
from safetensors.torch import load_file
from stored_tensors import INDEX, changed_json, changed_tensors, source_of

from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.pruning.masks import KeepMask


def change(
    source: Path, name: str, new: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Replace a tensor of a single file, or delete it."""
    with changed_tensors(source) as tensors:
        tensor = new(tensors.pop(name))
        if tensor is not None:
            tensors[name] = tensor


LAST = "model.layers.1.mlp.experts.2.up_proj.weight"
UP = r"model\.layers\.1\.mlp\.experts\.gate_up_proj"


def pruned(model: Any, source: Path, out: Path) -> Path:
    """The model in `source`, pruned with a random mask."""
    return prune_folder(source, random_keep(model), out)


@pytest.mark.parametrize(
    ("family", "name", "new", "message"),
    [
        ("qwen3_moe", LAST, lambda _: None, f"lacks 1 of its weights .{UP}"),
        (
            "gpt_oss",
            "model.layers.1.mlp.experts.down_proj_bias",
            lambda _: None,
            r"lacks 1 of its weights .*layers\.1.*down_proj_bias",
        ),
        (
            "qwen3_moe",
            LAST,
            lambda t: t.to(torch.float8_e4m3fn),
            f"{LAST} \\(F8_E4M3 .* has no .*_scale_inv",
        ),
        (
            "granitemoe",
            "model.layers.0.block_sparse_moe.output_linear.weight",
            lambda t: t[:3],
            r"has in other shapes 1 of its weights .*layers\.0.*down_proj",
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
        pruned(model, source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_expert_of_another_shape_is_found_when_its_layer_is_read(
    tmp_path: Path,
) -> None:
    """It is joined with others: the first of them is named, and both shapes."""
    model, source = source_of(tmp_path)
    change(source, LAST, lambda tensor: tensor[:3])
    shapes = r"experts\.0\.gate_proj.* \[8, 16\] .* \[3, 16\]"
    with pytest.raises(LayoutError, match=shapes):
        pruned(model, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{LAST}_scale_inv", rf"config.json does not, 1 .*{LAST}_scale_inv"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "1 of its weights"),
        (LAST.replace(".2.", ".4."), f"lacks 1 of its weights .{UP}"),
        ("model.layers.1.mlp.experts.02.up_proj.weight", f"lacks 1 .*{UP}"),
    ],
)
def test_tensors_that_experts_do_not_have(
    name: str, message: str, tmp_path: Path
) -> None:
    """Scales, packed blocks, an expert too many, an expert twice."""
    model, source = source_of(tmp_path)
    with changed_tensors(source) as tensors:
        tensors[name] = tensors[LAST]
    with pytest.raises(LayoutError, match=message):
        pruned(model, source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def with_stray_name(source: Path) -> None:
    """Let the index name a tensor that is nowhere."""
    with changed_json(source / INDEX) as index:
        index["weight_map"]["lost"] = sorted(index["weight_map"].values())[0]


def with_tensor_twice(source: Path) -> None:
    """Add a tensor of the first file to the second."""
    first, second = sorted(source.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    with changed_tensors(second) as tensors:
        tensors[name] = tensor


def with_unknown_type(source: Path) -> None:
    """Let a tensor have a type of the future."""
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F99"', 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_stray_name, r"lacks lost, which model.safetensors.index.json expects"),
        (
            with_tensor_twice,
            r"is in .*model-00002.* and in model-00001.* expected it once",
        ),
        (with_unknown_type, r"model-00002.*an unknown type \(F99\)"),
    ],
)
def test_indexes_and_headers_that_do_not_fit(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    """The file and the tensor are named, and nothing is written."""
    model, source = source_of(tmp_path, max_shard_size="9KB")
    damage(source)
    with pytest.raises(SpecError, match=message):
        pruned(model, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_masks_of_other_models(tmp_path: Path) -> None:
    """Of other layers, other sizes, or of different widths where one is needed."""
    model, source = source_of(tmp_path)
    keep, out = random_keep(model), tmp_path / "out"
    other = KeepMask({0: keep.by_layer(0)})
    with pytest.raises(SpecError, match=r"layers \[0\], the model's .* \[0, 1\]"):
        prune_folder(source, other, out)
    narrow = KeepMask({k: kept[:, :5] for k, kept in keep.arrays.items()})
    with pytest.raises(SpecError, match=r"shape \(4, 5\), expected \(4, 8\)"):
        prune_folder(source, narrow, out)
    ragged = KeepMask(keep.arrays, {"structure": "uniform"})
    with pytest.raises(SpecError, match="keep 0 to 8 atoms, a uniform checkpoint"):
        prune_folder(source, ragged, out)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
