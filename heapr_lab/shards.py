"""Slice a checkpoint's safetensors files, one tensor at a time, without its model.

Slicing only moves bits, so tensors are read and written as integers of their size. What
is not of routed experts is copied byte for byte. Of each file there is one sliced file
of the same name, laid out as safetensors' own writer lays it out.

Shapes: E n_experts, I d_inter, D d_expert; a *part* is one of the rows of the input
projection that an atom has: W_gate's and W_up's with a gate, else W_up's alone.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)

from heapr_lab.experts import ExpertsLayer, find_experts
from heapr_lab.masks import KeepMask
from heapr_lab.ragged import RaggedExperts, expert_conversions
from heapr_lab.specs import CacheError, LayoutError, SpecError
from heapr_lab.store import read_json, write_json
from heapr_lab.surgery import check_keep
from heapr_lab.uniform import uniform_width

PROGRESS_NAME = ".partial-slices.json"
"""In an unfinished folder: what its files are made of."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BLOCK = 2**22
"""Bytes read at once of what is copied."""

_FLOATS: dict[str, Any] = {
    "F16": np.uint16,
    "BF16": np.uint16,
    "F32": np.uint32,
    "F64": np.uint64,
}
_TORCH = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0",
    "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32",
    "C64", "F64", "I64", "U64",
)  # fmt: skip
"""Types of safetensors as its writer sorts them; the last come first in a file."""


def slice_files(
    source: Path,
    skeleton: nn.Module,
    keep: KeepMask,
    out: Path,
    *,
    stacked: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the weights in `source` without the atoms outside `keep`.

    Everything is checked before anything is written. A run that was interrupted goes on
    at the file it was at. Memory: two copies of the largest matrix of one expert.

    Args:
        source: a folder with `model.safetensors`, or with its shards and their index.
        skeleton: the unpruned model, which may be on the meta device.
        keep: what stays.
        out: the folder to write weights and index into, made if need be.
        stacked: leave the experts of a layer in one tensor where they are in one, only
            narrower; needs a mask that keeps equally many atoms of every expert.
        progress: called with the bytes written so far and the bytes to write.

    Returns:
        `out`.

    Raises:
        SpecError: a file of `source` is missing or incomplete, or `keep` does not fit.
        LayoutError: the weights of the experts are incomplete, quantised, or laid out
            as this module does not know.
        CacheError: `out` holds other weights, or was changed meanwhile.
    """
    source, out = Path(source), Path(out)
    stored, index = _read_source(source)
    files = _Planner(skeleton, keep, stacked=stacked).files(stored)
    resumed = _claim(out, files, {"mask": keep.fingerprint, "stacked": stacked})
    total, done = sum(file.n_bytes for file in files), 0
    for file in files:
        whole = resumed and file.is_written(out)
        for n_bytes in [file.n_bytes] if whole else file.write(out):
            done += n_bytes
            if progress is not None:
                progress(done, total)
    _check_written(out, files)
    if index is not None:
        write_json(out / _INDEX, _new_index(files, stored, index))
    (out / PROGRESS_NAME).unlink()
    return out


def down_norms(source: Path, skeleton: nn.Module) -> dict[int, np.ndarray]:
    """Squared norm of each column of W_down of every MoE layer's first expert, (I,).

    Arguments and errors are those of `slice_files`. By these numbers a table of the
    same model is known without loading it.
    """
    layers = {f"{layer.name}.down_proj": layer for layer in find_experts(skeleton)}
    full = KeepMask(
        {k.layer: np.ones((k.n_experts, k.d_inter), bool) for k in layers.values()}
    )
    stored, _ = _read_source(source)
    found = {}
    for file in _Planner(skeleton, full, stacked=False).files(stored):
        with file.source.open("rb") as stream:
            for piece in file.pieces:
                name = piece.weight.name if piece.weight else ""
                if name in layers and piece.experts[0] == 0:
                    raw = torch.from_numpy(next(piece.data(stream)))
                    columns = raw.view(_TORCH[piece.tensor.dtype]).double()
                    found[layers[name].layer] = columns.square().sum(0).numpy()
    return found


# --- reading a checkpoint's headers -----------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


_Stored = dict[Path, dict[str, _Tensor]]
"""The tensors in each file."""


def _read_source(source: Path) -> tuple[_Stored, dict[str, Any] | None]:
    """The tensors in each file of a checkpoint, and its index if it has one.

    Raises:
        SpecError: a file is missing or incomplete.
    """
    if (source / _SINGLE).is_file():
        return {source / _SINGLE: _read_header(source / _SINGLE)}, None
    if not (source / _INDEX).is_file():
        raise SpecError(
            f"{source} has neither {_SINGLE} nor {_INDEX}: expected a folder with a "
            "model's safetensors files; download them, or convert the weights"
        )
    try:
        index = json.loads((source / _INDEX).read_text(encoding="utf-8"))
        weight_map = dict(index["weight_map"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SpecError(
            f"{source / _INDEX} has no whole weight_map: download it again"
        ) from error
    stored: _Stored = {}
    for name, file in sorted(weight_map.items(), key=lambda item: item[::-1]):
        path = source / file
        if path not in stored:
            if Path(file).name != file or not path.is_file():
                raise SpecError(
                    f"{source / _INDEX} names {file} for {name}, but there is no such "
                    "file beside it: download it"
                )
            stored[path] = _read_header(path)
        if name not in stored[path]:
            raise SpecError(
                f"{path} lacks {name}, which {_INDEX} says is there: they are of "
                "different versions; download both again"
            )
    for path, tensors in stored.items():
        twice = [n for n in tensors if weight_map.get(n, path.name) != path.name]
        if twice:
            raise SpecError(
                f"{twice[0]} is in {path} and in {weight_map[twice[0]]}, expected it "
                "once: download the checkpoint again"
            )
    return stored, index


def _read_header(path: Path) -> dict[str, _Tensor]:
    """The tensors in a safetensors file, whose size is checked.

    Raises:
        SpecError: it is not whole.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        end = 8 + int.from_bytes(file.read(8), "little")
        text = file.read(end - 8) if end <= size else b""
    try:
        header = {k: v for k, v in json.loads(text).items() if k != "__metadata__"}
        tensors = {
            name: _Tensor(
                str(entry["dtype"]),
                tuple(entry["shape"]),
                end + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SpecError(
            f"{path} ({size} bytes) has no whole safetensors header: it is truncated "
            "or of another kind; download it again"
        ) from error
    for name in sorted(tensors, key=lambda n: (tensors[n].start, tensors[n].n_bytes)):
        tensor = tensors[name]
        if tensor.start != end or tensor.n_bytes < 0 or tensor.dtype not in _ORDER:
            raise SpecError(
                f"{path}: {name} is misplaced or of an unknown type ({tensor.dtype}): "
                "download the file again"
            )
        end += tensor.n_bytes
    if end != size:
        last = max(tensors, key=lambda n: tensors[n].start, default="none")
        raise SpecError(
            f"{path} has {size} bytes, its header says {end} (the last tensor is "
            f"{last}): it is not whole; download it again"
        )
    return tensors


# --- names: of files, and of the model --------------------------------------------


@dataclass(frozen=True, eq=False)
class _Weight:
    """A parameter of an experts module, what stays of it, and its tensors in files."""

    name: str
    shape: tuple[int, ...]
    keep: np.ndarray
    """What stays of each expert, bool (E, I)."""
    axis: int | None
    """Of the atoms in the tensor of one expert; none in the output bias."""
    n_parts: int
    interleaved: bool
    transposed: bool
    """Whether the tensor of one expert is the transpose of what `nn.Linear` has."""
    patterns: tuple[str, ...]
    """Name in the model of each part of an expert, `*` for the expert."""

    def expert_shape(self, n_parts: int = 1) -> tuple[int, ...]:
        """Shape of so many parts of one expert in a file, uncut."""
        shape = list(self.shape[1:])
        if self.axis is not None:
            shape[self.axis] = n_parts * self.keep.shape[1]
        return tuple(shape)


@dataclass(frozen=True)
class _Found:
    """A tensor in a file, and what it becomes in the model."""

    file: Path
    name: str
    tensor: _Tensor
    parameter: str
    converter: Any
    """What joins it with others, if anything does."""
    part: int
    """Which of those that are joined."""

    def __str__(self) -> str:
        return f"{self.file}: {self.name} ({self.tensor.dtype} {self.tensor.shape})"


def _found(skeleton: Any, conversions: list[Any], stored: _Stored) -> Iterator[_Found]:
    """What becomes of each tensor when transformers loads it into `skeleton`."""
    known, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    owners: dict[Any, Any] = {p: c for c in converters for p in c.source_patterns}
    for file, tensors in stored.items():
        for name, tensor in tensors.items():
            new, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if new not in known and name in known:
                new, pattern = rename_source_key(name, [], [], prefix, known)
            owner = owners.get(pattern)
            part = owner.source_patterns.index(pattern) if owner else 0
            yield _Found(file, name, tensor, new, owner, part)


def _weights_of(
    layer: ExpertsLayer, keep: np.ndarray, conversions: list[Any]
) -> Iterator[_Weight]:
    """The parameters of an experts module."""
    ragged = RaggedExperts(layer.module, keep.sum(1).tolist())
    turned = bool(layer.module.is_transposed)
    up, n_parts = ("gate_up_proj", 2) if layer.gated else ("up_proj", 1)
    kinds = {
        "up_rows": (up, int(turned), n_parts),
        "down_columns": ("down_proj", int(not turned), 1),
        "up_bias": (f"{up}_bias", 0, n_parts),
        "down_bias": ("down_proj_bias", None, 1),
    }
    prefix = layer.name[: layer.name.find("layers.")]
    for conversion in expert_conversions(layer.name, ragged, conversions):
        kind = conversion.target_patterns[0].rpartition(".")[2]
        name, axis, n_parts = kinds[kind]
        patterns = conversion.reverse_transform().target_patterns
        yield _Weight(
            name=f"{layer.name}.{name}",
            shape=tuple(getattr(layer.module, name).shape),
            keep=keep,
            axis=axis,
            n_parts=n_parts,
            interleaved=not layer.module.is_concatenated,
            transposed=turned,
            patterns=tuple(prefix + pattern for pattern in patterns),
        )


# --- what to write ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Piece:
    """A tensor to write: a copy of one in a file, or what stays of experts in it."""

    name: str
    tensor: _Tensor
    weight: _Weight | None = None
    experts: range = range(1)
    """Those in this piece, which follow each other in the file."""
    start: int = 0
    """First byte of these experts in the file."""
    parts: tuple[bool, ...] = (True,)
    """Which of the parts that lie there stay."""
    stacked: bool = False
    transposed: bool = False

    @property
    def dtype(self) -> Any:
        """Integers of the size of the tensor's elements."""
        return np.dtype(_FLOATS[self.tensor.dtype])

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is written."""
        if self.weight is None:
            return self.tensor.shape
        shape, axis = list(self.weight.expert_shape()), self.weight.axis
        if axis is not None:
            width = int(self.weight.keep[self.experts[0]].sum())
            shape[axis] = sum(self.parts) * width
        shape = shape[::-1] if self.transposed else shape
        return (len(self.experts), *shape) if self.stacked else tuple(shape)

    @property
    def n_bytes(self) -> int:
        """As it is written."""
        if self.weight is None:
            return self.tensor.n_bytes
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def data(self, file: BinaryIO) -> Iterator[Any]:
        """Its bytes, part by part.

        Raises:
            SpecError: the file became shorter.
        """
        if self.weight is None:
            start, size, block = self.tensor.start, self.tensor.n_bytes, _BLOCK
        else:
            shape = self.weight.expert_shape(len(self.parts))
            block = math.prod(shape) * self.dtype.itemsize
            start, size = self.start, block * len(self.experts)
        file.seek(start)
        for number, begin in enumerate(range(0, size, block)):
            found = file.read(min(block, size - begin))
            if len(found) != min(block, size - begin):
                raise SpecError(f"{file.name} became shorter while it was read")
            if self.weight is None:
                yield found
            else:
                whole = np.frombuffer(found, self.dtype).reshape(shape)
                yield self._cut(whole, self.weight, self.experts[number])

    def _cut(self, whole: np.ndarray, weight: _Weight, expert: int) -> np.ndarray:
        if weight.axis is not None:
            stays = np.outer(self.parts, weight.keep[expert])
            stays = stays.T if weight.interleaved else stays
            whole = whole.compress(stays.ravel(), weight.axis)
        return np.ascontiguousarray(whole.T if self.transposed else whole)


@dataclass(frozen=True, eq=False)
class _File:
    """A file to write."""

    source: Path
    pieces: list[_Piece]
    """In the order of safetensors' own writer."""

    @property
    def n_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(piece.n_bytes for piece in self.pieces)

    def header(self) -> bytes:
        """All that stands before its tensors."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for piece in self.pieces:
            start, end = end, end + piece.n_bytes
            table[piece.name] = {
                "dtype": piece.tensor.dtype,
                "shape": piece.shape,
                "data_offsets": [start, end],
            }
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def write(self, out: Path) -> Iterator[int]:
        """Write it, whole or not at all; gives 0, then the bytes of each tensor."""
        temporary = out / f".partial-{self.source.name}"
        n_bytes = 0
        try:
            with self.source.open("rb") as file, temporary.open("wb") as target:
                target.write(self.header())
                for piece in self.pieces:
                    yield n_bytes
                    target.writelines(piece.data(file))
                    n_bytes = piece.n_bytes
            temporary.replace(out / self.source.name)
        finally:
            temporary.unlink(missing_ok=True)
        yield n_bytes

    def is_written(self, out: Path) -> bool:
        """Whether it is there, of the right size and with the right header."""
        path, header = out / self.source.name, self.header()
        if not path.is_file() or path.stat().st_size != len(header) + self.n_bytes:
            return False
        with path.open("rb") as file:
            return file.read(len(header)) == header


class _Planner:
    """Finds what becomes of each tensor, and counts those of experts."""

    def __init__(self, skeleton: Any, keep: KeepMask, *, stacked: bool) -> None:
        layers = find_experts(skeleton)
        _check_mask(layers, keep, stacked=stacked)
        self.skeleton, self.stacked = skeleton, stacked
        self.conversions = get_model_conversion_mapping(skeleton)
        self.renamings: list[Any] = []
        """From names in the model to names in files."""
        self.weights = {
            weight.name: weight
            for layer in layers
            for weight in _weights_of(
                layer, keep.by_layer(layer.layer), self.conversions
            )
        }
        prefix = f"{skeleton.base_model_prefix}."
        names = [f"{layer.name}." for layer in layers]
        self.places = (*names, *(name.removeprefix(prefix) for name in names))
        """How the names of what is in experts modules begin."""
        self.seen: dict[tuple[str, int, int], str] = {}
        """Where each (parameter, expert, part) was found."""

    def files(self, stored: _Stored) -> list[_File]:
        """The files to write.

        Raises:
            LayoutError: the weights of experts are not those that the model has.
        """
        every = list(_found(self.skeleton, self.conversions, stored))
        # As a loaded model does when it is saved: undo the renamings that were used.
        used = [c.reverse_transform() for c in self.conversions[::-1] if c.was_used()]
        self.renamings = [c for c in used if isinstance(c, WeightRenaming)]
        known = self.skeleton.state_dict()
        pieces: dict[Path, list[_Piece]] = {path: [] for path in stored}
        for found in every:
            weight = self.weights.get(found.parameter)
            if weight is not None:
                _check_tensor(found, weight)
                pieces[found.file] += self._pieces(found, weight)
            elif found.parameter in known or not self._in_experts(found):
                pieces[found.file].append(_Piece(found.name, found.tensor))
            else:
                raise LayoutError(
                    f"{found} belongs to routed experts, but is none of their weights "
                    "and biases, so they are quantised or of another version; expected "
                    f"only {', '.join(_FLOATS)} weights: dequantise them"
                )
        self._check_complete()
        return [_File(path, sorted(own, key=_place)) for path, own in pieces.items()]

    def _in_experts(self, found: _Found) -> bool:
        return found.parameter.startswith(self.places)

    def _pieces(self, found: _Found, weight: _Weight) -> Iterator[_Piece]:
        """What is written of a tensor of experts."""
        start, n_experts = found.tensor.start, weight.shape[0]
        turned = weight.transposed and not self.stacked
        if found.converter is not None:
            expert = int([part for part in found.name.split(".") if part.isdigit()][-1])
            self._see(found, weight, expert=expert, part=found.part)
            yield _Piece(
                found.name,
                found.tensor,
                weight=weight,
                experts=range(expert, expert + 1),
                start=start,
                transposed=turned,
            )
            return
        each = [(e, p) for e in range(n_experts) for p in range(weight.n_parts)]
        for expert, part in each:
            self._see(found, weight, expert=expert, part=part)
        if self.stacked:
            yield _Piece(
                found.name,
                found.tensor,
                weight=weight,
                experts=range(n_experts),
                start=start,
                parts=(True,) * weight.n_parts,
                stacked=True,
            )
            return
        for expert, part in each:
            yield _Piece(
                self._name(weight, expert=expert, part=part),
                found.tensor,
                weight=weight,
                experts=range(expert, expert + 1),
                start=start + expert * found.tensor.n_bytes // n_experts,
                parts=tuple(part == p for p in range(weight.n_parts)),
                transposed=turned,
            )

    def _name(self, weight: _Weight, *, expert: int, part: int) -> str:
        name = weight.patterns[part].replace("*", str(expert))
        return str(apply_renamings(name, self.renamings))

    def _see(self, found: _Found, weight: _Weight, *, expert: int, part: int) -> None:
        key = (weight.name, expert, part)
        if expert >= weight.shape[0] or key in self.seen:
            other = self.seen.get(key, f"expert {weight.shape[0] - 1}, the last one")
            raise LayoutError(
                f"{found} is of expert {expert} of {weight.name}, expected none beside "
                f"{other}: the checkpoint is of another model, or has weights twice"
            )
        self.seen[key] = str(found)

    def _check_complete(self) -> None:
        for weight in self.weights.values():
            parts = range(weight.n_parts)
            every = [(e, p) for e in range(weight.shape[0]) for p in parts]
            lost = [(e, p) for e, p in every if (weight.name, e, p) not in self.seen]
            if lost:
                first = self._name(weight, expert=lost[0][0], part=lost[0][1])
                raise LayoutError(
                    f"the checkpoint lacks {len(lost)} of the {len(every)} parts of "
                    f"{weight.name}, the first is {first}: download it again, or give "
                    "the configuration that it has"
                )


def _place(piece: _Piece) -> tuple[int, str]:
    """What safetensors' own writer sorts by."""
    return -_ORDER.index(piece.tensor.dtype), piece.name


def _check_mask(layers: list[ExpertsLayer], keep: KeepMask, *, stacked: bool) -> None:
    """Check that `keep` is of the model.

    Raises:
        SpecError: it is not, or its widths differ where they must not.
    """
    numbers = [layer.layer for layer in layers]
    if list(keep.layers) != numbers:
        raise SpecError(
            f"the mask is for the layers {list(keep.layers)}, the model's MoE layers "
            f"are {numbers}: the mask was made for another model"
        )
    for layer in layers:
        check_keep(layer, torch.from_numpy(keep.by_layer(layer.layer).copy()))
    if stacked:
        uniform_width(keep)


def _check_tensor(found: _Found, weight: _Weight) -> None:
    """Check that a tensor of experts can be sliced.

    Raises:
        LayoutError: it is quantised, of another shape, or transformers would change it.
    """
    tensor, converter = found.tensor, found.converter
    if tensor.dtype not in _FLOATS:
        raise LayoutError(
            f"{found} is quantised, expected one of {', '.join(_FLOATS)}: dequantise "
            "the checkpoint"
        )
    expected = weight.shape if converter is None else weight.expert_shape()
    n_bytes = math.prod(expected) * np.dtype(_FLOATS[tensor.dtype]).itemsize
    if (tensor.shape, tensor.n_bytes) != (expected, n_bytes):
        raise LayoutError(
            f"{found} has {tensor.n_bytes} bytes, the model expects {expected} and "
            f"{n_bytes}: it is of another model, or already pruned"
        )
    if converter is None:
        return
    joins = [(type(op).__name__, op.dim) for op in converter.operations]
    known = [("MergeModulelist", 0)]
    if weight.n_parts > 1 and weight.axis is not None:
        known.append(("Concatenate", weight.axis + 1))
    if joins != known or len(converter.source_patterns) != weight.n_parts:
        raise LayoutError(
            f"{found} becomes part of {weight.name} by {joins}, expected {known}: load "
            "the model and prune it in memory instead"
        )


# --- the folder -------------------------------------------------------------------


def _claim(out: Path, files: list[_File], facts: dict[str, Any]) -> bool:
    """Say in `out` what is made there; whether that was begun before.

    Raises:
        SpecError: `out` is where the sources are.
        CacheError: something else was begun there, or is there.
    """
    if out.resolve() == files[0].source.parent.resolve():
        raise SpecError(f"{out} is the source itself: give another folder")
    stats = {file.source.name: file.source.stat() for file in files}
    stamps = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    expected = {**facts, "source": stamps}
    path = out / PROGRESS_NAME
    if path.exists():
        found = read_json(path)
        if found != expected:
            differing = [name for name in expected if found.get(name) != expected[name]]
            raise CacheError(
                f"{out} holds an unfinished checkpoint of another "
                f"{' and '.join(differing)}: choose another folder, or delete it"
            )
        return True
    others = {p.name for p in out.glob("*.safetensors*")} - {*stats, _INDEX}
    if others:
        raise CacheError(
            f"{out} holds other weights ({sorted(others)[0]}), expected a new folder: "
            "choose another one, or delete it"
        )
    write_json(path, expected)
    return False


def _check_written(out: Path, files: list[_File]) -> None:
    """Check that every tensor is there once, as planned.

    Raises:
        CacheError: it is not.
    """
    for file in files:
        if not file.is_written(out):
            raise CacheError(
                f"{out / file.source.name} is not what was written there: another "
                "process changed it; run the same again"
            )


def _new_index(
    files: list[_File], stored: _Stored, index: dict[str, Any]
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
