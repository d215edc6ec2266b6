"""Tiny models saved in files, the tensors in them, and how a test changes these."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from families import tiny_model
from safetensors.torch import load_file, save_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def source_of(folder: Path, family: str = "qwen3_moe") -> tuple[Any, Path]:
    """A tiny model, and the folder it is saved in."""
    model = tiny_model(family, dtype=torch.float32)
    model.save_pretrained(folder / "source")
    return model, folder / "source"


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the safetensors files in a folder; each name is there once."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    assert len(tensors) == sum(map(len, files))
    return tensors


def written_at(folder: Path) -> dict[str, int]:
    """When each safetensors file in a folder was written."""
    return {p.name: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}


def same_tensors(folder: Path, other: Path) -> None:
    """Two folders have tensors of the same names, types, shapes and bits."""
    same_bits(tensors_in(folder), tensors_in(other))


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Both have tensors of the same names, types, shapes and bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@contextmanager
def changed_tensors(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a file, or of a folder's only one, written with the changes."""
    path = path / SINGLE if path.is_dir() else path
    tensors = load_file(path)
    yield tensors
    kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(kept, path, metadata={"format": "pt"})


def stored(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """What changes the tensors in a file, or in the only one of a folder."""

    def damage(path: Path) -> None:
        with changed_tensors(path) as tensors:
            change(tensors)

    return damage


@contextmanager
def changed_json(path: Path) -> Iterator[dict[str, Any]]:
    """The content of a JSON file, or of a folder's config.json, likewise."""
    path = path / "config.json" if path.is_dir() else path
    held = json.loads(path.read_text())
    yield held
    path.write_text(json.dumps(held))


def configured(**changes: Any) -> Callable[[Path], None]:
    """What changes settings in a JSON file, or in a folder's config.json.

    None takes one away.
    """

    def damage(path: Path) -> None:
        with changed_json(path) as settings:
            settings |= changes
            for name in [name for name in changes if changes[name] is None]:
                del settings[name]

    return damage
