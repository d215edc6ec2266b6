"""Tiny models saved in files, the files sliced, and the tensors in them."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from families import tiny_model
from keeps import random_keep
from safetensors.torch import load_file
from torch import nn

from heapr_lab.checkpoints import slice_files as shards
from heapr_lab.models.folders import skeleton_of
from heapr_lab.pruning.masks import KeepMask

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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
