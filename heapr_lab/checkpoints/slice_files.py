"""Slice a checkpoint's safetensors files, one tensor at a time, without its model.

Slicing only copies bits, so tensors are read and written as integers of their size. All
tensors that are not of routed experts are copied byte for byte; where shared experts
become wider, they get zeros besides. Each file becomes one sliced file of the same
name, in the layout of safetensors' own writer.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from heapr_lab.checkpoints.slice_plan import Piece, Planner, SlicedFile
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.safetensors_headers import INDEX, TORCH, Stored, read_source
from heapr_lab.progress import Progress, no_report
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.storage.files import checksum, read_json, write_json

PROGRESS_NAME = ".partial-slices.json"
"""In an unfinished folder: the sources of its files."""


def slice_files(
    source: Path,
    skeleton: nn.Module,
    keep: KeepMask,
    out: Path,
    *,
    stacked: bool = False,
    padded: Mapping[str, tuple[int, ...]] | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Write the weights in `source` without the atoms outside `keep`.

    Everything is checked before anything is written. An interrupted run resumes at the
    file it had reached. Memory: two copies of the largest matrix of one expert.

    Args:
        source: a folder with `model.safetensors`, or with its shards and their index.
        skeleton: the unpruned model, which may be on the meta device.
        keep: the kept atoms.
        out: the folder for weights and index, created if necessary.
        stacked: keep the experts of a layer in one tensor where they are in one, only
            narrower; needs a mask with one width for all experts.
        padded: larger shapes of other tensors, by their names in the model; they get
            zeros at the end of rows and columns.
        progress: called with (bytes written, bytes in all).

    Returns:
        The SHA-256 of each file of weights.

    Raises:
        SpecError: a file of `source` is missing or incomplete, or `keep` does not fit.
        LayoutError: the weights of the experts are incomplete, quantised, or in an
            unknown layout.
        CacheError: `out` holds other weights, or was changed in the meantime.
    """
    source, out = Path(source), Path(out)
    stored, index = read_source(source)
    files = Planner(skeleton, keep, stacked=stacked, padded=padded).files(stored)
    note = _claim(out, files, {"mask": keep.fingerprint, "stacked": stacked})
    written: dict[str, str] = note["written"]
    total, done = sum(file.n_bytes for file in files), 0
    report = progress or no_report
    for file in files:
        name = file.source.name

        def finished(sha256: str, name: str = name) -> None:
            written[name] = sha256
            write_json(out / PROGRESS_NAME, note)

        whole = _is_file(out / name, written.get(name))
        for n_bytes in [file.n_bytes] if whole else file.write(out, finished):
            done += n_bytes
            report(done, total)
    _check_written(out, files)
    if index is not None:
        write_json(out / INDEX, _new_index(files, stored, index))
    (out / PROGRESS_NAME).unlink()
    return written


def squared_norms(
    source: Path, skeleton: nn.Module
) -> dict[int, dict[str, np.ndarray]]:
    """`w_down_sq`, `w_up_sq` and, with a gate, `w_gate_sq` of every MoE layer: (E, I).

    Arguments and errors are those of `slice_files`. These numbers identify the model of
    a table without loading it; all weights of experts are read once.
    """
    layers = find_experts(skeleton)
    full = KeepMask({k.layer: np.ones((k.n_experts, k.d_inter), bool) for k in layers})
    columns = {name: (k, own) for k in layers for name, own in _columns_of(k).items()}
    found: dict[int, dict[str, np.ndarray]] = {k.layer: {} for k in layers}
    stored, _ = read_source(source)
    for file in Planner(skeleton, full, stacked=False).files(stored):
        with file.source.open("rb") as stream:
            for piece in file.pieces:
                if piece.weight is not None and piece.weight.name in columns:
                    layer, names = columns[piece.weight.name]
                    norms = found[layer.layer].setdefault(
                        names[piece.part], np.zeros((layer.n_experts, layer.d_inter))
                    )
                    norms[piece.experts[0]] = _atom_norms(piece, stream)
    return found


def _columns_of(layer: ExpertsLayer) -> dict[str, tuple[str, ...]]:
    """Each weight matrix of a layer's experts, with the table columns of its parts."""
    up = (
        {"gate_up_proj": ("w_gate_sq", "w_up_sq")}
        if layer.gated
        else {"up_proj": ("w_up_sq",)}
    )
    every = {**up, "down_proj": ("w_down_sq",)}
    return {f"{layer.name}.{name}": columns for name, columns in every.items()}


def _atom_norms(piece: Piece, stream: BinaryIO) -> np.ndarray:
    """Squared norm of each atom's weights in a part of an expert, (I,)."""
    raw = torch.from_numpy(next(piece.data(stream)))
    weight = raw.view(TORCH[piece.tensor.dtype])  # (D, I) of W_down, else (I, D)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32)).numpy()
    down = piece.weight is not None and piece.weight.name.endswith("down_proj")
    norms: np.ndarray = np.einsum("da,da->a" if down else "ad,ad->a", wide, wide)
    return norms


# --- the folder -------------------------------------------------------------------


def _claim(out: Path, files: list[SlicedFile], facts: dict[str, Any]) -> dict[str, Any]:
    """Record in `out` what is written there; the record, with its finished files.

    Raises:
        SpecError: `out` is the folder of the sources.
        CacheError: another checkpoint was begun, or is, in `out`.
    """
    if out.resolve() == files[0].source.parent.resolve():
        raise SpecError(f"{out} is the source itself: give another folder")
    stamps = stamps_of(file.source for file in files)
    expected = {**facts, "source": stamps}
    path = out / PROGRESS_NAME
    if begun(path, expected):
        return {"written": {}, **read_json(path)}
    others = {p.name for p in out.glob("*.safetensors*")} - {*stamps, INDEX}
    if others:
        raise CacheError(
            f"{out} holds other weights ({sorted(others)[0]}), expected a new folder: "
            "choose another one, or delete it"
        )
    note = {**expected, "written": {}}
    write_json(path, note)
    return note


def stamps_of(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Size and time of each file, by its name, to recognise unchanged files."""
    stats = {path.name: path.stat() for path in paths}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _is_file(path: Path, sha256: str | None) -> bool:
    """Whether the file exists and has this checksum."""
    return sha256 is not None and path.is_file() and checksum(path) == sha256


def begun(path: Path, expected: dict[str, Any]) -> bool:
    """Whether, by the record in `path`, `expected` was begun in its folder.

    Raises:
        CacheError: another checkpoint was.
    """
    if not path.exists():
        return False
    found = read_json(path)
    differing = [name for name in expected if found.get(name) != expected[name]]
    if differing:
        raise CacheError(
            f"{path.parent} holds an unfinished checkpoint of another "
            f"{' and '.join(differing)}: choose another folder, or delete it"
        )
    return True


def _check_written(out: Path, files: list[SlicedFile]) -> None:
    """Check that every file was written as planned.

    Raises:
        CacheError: one was not.
    """
    for file in files:
        if not file.is_written(out):
            raise CacheError(
                f"{out / file.source.name} is not what was written there: another "
                "process changed it; run the same command again"
            )


def _new_index(
    files: list[SlicedFile], stored: Stored, index: dict[str, Any]
) -> dict[str, Any]:
    """The index of the sliced files."""
    pieces = [(p, file.source.name) for file in files for p in file.pieces]
    metadata = {**index.get("metadata", {})}
    metadata["total_size"] = sum(piece.n_bytes for piece, _ in pieces)
    if "total_parameters" in metadata:
        before = [t for tensors in stored.values() for t in tensors.values()]
        gone = sum(math.prod(t.shape) for t in before)
        gone -= sum(math.prod(piece.shape) for piece, _ in pieces)
        metadata["total_parameters"] -= gone
    return {
        "metadata": metadata,
        "weight_map": {piece.name: name for piece, name in pieces},
    }
