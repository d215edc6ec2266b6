"""The tensors that are written for a checkpoint when its experts are sliced.

Shapes: E n_experts, I d_inter, D d_expert; a *part* is one of the matrices of the input
projection, in which an atom has a row: W_gate and W_up, or W_up alone without a gate.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from heapr_lab.checkpoints.uniform import uniform_width
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.predicting import predicting
from heapr_lab.models.ragged_experts import RaggedExperts, expert_conversions
from heapr_lab.models.safetensors_headers import FLOATS, ORDER, Stored, StoredTensor
from heapr_lab.models.weights_on_disk import FoundTensor, check_whole, find_tensors
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import keeps_of

_BLOCK = 2**22
"""Bytes read at once of tensors that are copied."""


# --- names: of files, and of the model --------------------------------------------


@dataclass(frozen=True, eq=False)
class ExpertWeight:
    """A parameter of an experts module, its kept atoms, and its tensors in files."""

    name: str
    shape: tuple[int, ...]
    keep: np.ndarray
    """The kept atoms of each expert, bool (E, I)."""
    axis: int | None
    """The axis of the atoms in the tensor of one expert; None in the output bias."""
    n_parts: int
    interleaved: bool
    transposed: bool
    """Whether the tensor of one expert is transposed with respect to `nn.Linear`."""
    patterns: tuple[str, ...]
    """Name in the model of each part of an expert, `*` for the expert."""

    def expert_shape(self, n_parts: int = 1) -> tuple[int, ...]:
        """Shape of `n_parts` parts of one expert in a file, before slicing."""
        shape = list(self.shape[1:])
        if self.axis is not None:
            shape[self.axis] = n_parts * self.keep.shape[1]
        return tuple(shape)


def _weights_of(
    layer: ExpertsLayer, keep: np.ndarray, conversions: list[Any]
) -> Iterator[ExpertWeight]:
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
        yield ExpertWeight(
            name=f"{layer.name}.{name}",
            shape=tuple(getattr(layer.module, name).shape),
            keep=keep,
            axis=axis,
            n_parts=n_parts,
            interleaved=not layer.module.is_concatenated,
            transposed=turned,
            patterns=tuple(prefix + pattern for pattern in patterns),
        )


# --- tensors to write -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Piece:
    """A tensor to write: a copy of one in a file, or the kept atoms of experts."""

    name: str
    tensor: StoredTensor
    weight: ExpertWeight | None = None
    experts: range = range(1)
    """The experts in this piece, which are consecutive in the file."""
    start: int = 0
    """First byte of these experts in the file."""
    parts: tuple[bool, ...] = (True,)
    """Which of the parts in the file belong to this piece."""
    stacked: bool = False
    transposed: bool = False
    part: int = 0
    """Which part it is, if it is one."""
    padded: tuple[int, ...] | None = None
    """The larger shape of a copy, a matrix that gets zeros at its ends."""

    @property
    def dtype(self) -> Any:
        """Integers of the size of the tensor's elements."""
        return np.dtype(FLOATS[self.tensor.dtype])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is written."""
        if self.weight is None:
            return self.padded or self.tensor.shape
        shape, axis = list(self.weight.expert_shape()), self.weight.axis
        if axis is not None:
            width = int(self.weight.keep[self.experts[0]].sum())
            shape[axis] = sum(self.parts) * width
        shape = shape[::-1] if self.transposed else shape
        return (len(self.experts), *shape) if self.stacked else tuple(shape)

    @property
    def n_bytes(self) -> int:
        """The bytes that are written."""
        if self.weight is None and self.padded is None:
            return self.tensor.n_bytes
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def data(self, file: BinaryIO) -> Iterator[Any]:
        """Its data, block by block.

        Raises:
            SpecError: the file was truncated meanwhile.
        """
        if self.weight is None:
            row = self.tensor.n_bytes // self.tensor.shape[0] if self.padded else 1
            block = row * max(1, _BLOCK // row)
            start, size = self.tensor.start, self.tensor.n_bytes
        else:
            shape = self.weight.expert_shape(len(self.parts))
            block = math.prod(shape) * self.dtype.itemsize
            start, size = self.start, block * len(self.experts)
        file.seek(start)
        for number, begin in enumerate(range(0, size, block)):
            found = file.read(min(block, size - begin))
            if len(found) != min(block, size - begin):
                raise SpecError(
                    f"{file.name} became shorter while it was read: run again"
                )
            if self.weight is not None:
                whole = np.frombuffer(found, self.dtype).reshape(shape)
                yield self._cut(whole, self.weight, self.experts[number])
            elif self.padded is not None:
                yield self._widened(np.frombuffer(found, self.dtype), self.padded[1])
            else:
                yield found
        if self.padded is not None:
            n_more = self.padded[0] - self.tensor.shape[0]
            yield np.zeros((n_more, self.padded[1]), self.dtype)

    def _widened(self, rows: np.ndarray, n_columns: int) -> np.ndarray:
        rows = rows.reshape(-1, self.tensor.shape[1])
        return np.pad(rows, ((0, 0), (0, n_columns - rows.shape[1])))

    def _cut(self, whole: np.ndarray, weight: ExpertWeight, expert: int) -> np.ndarray:
        if weight.axis is not None:
            stays = np.outer(self.parts, weight.keep[expert])
            stays = stays.T if weight.interleaved else stays
            whole = whole.compress(stays.ravel(), weight.axis)
        return np.ascontiguousarray(whole.T if self.transposed else whole)


@dataclass(frozen=True, eq=False)
class SlicedFile:
    """A file to write."""

    source: Path
    pieces: list[Piece]
    """In the order of safetensors' own writer."""

    @property
    def n_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(piece.n_bytes for piece in self.pieces)

    def header(self) -> bytes:
        """The bytes before its tensors."""
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

    def write(self, out: Path, finished: Callable[[str], None]) -> Iterator[int]:
        """Write it atomically; yields 0, then the bytes of each tensor.

        `finished` is called with the SHA-256 of the file before the file is renamed.
        """
        temporary = out / f".partial-{self.source.name}"
        n_bytes, sha = 0, hashlib.sha256()
        try:
            with self.source.open("rb") as file, temporary.open("wb") as target:
                target.write(self.header())
                sha.update(self.header())
                for piece in self.pieces:
                    yield n_bytes
                    for part in piece.data(file):
                        target.write(part)
                        sha.update(part)
                    n_bytes = piece.n_bytes
            finished(sha.hexdigest())
            temporary.replace(out / self.source.name)
        finally:
            temporary.unlink(missing_ok=True)
        yield n_bytes

    def is_written(self, out: Path) -> bool:
        """Whether it exists with the right size and header."""
        path, header = out / self.source.name, self.header()
        if not path.is_file() or path.stat().st_size != len(header) + self.n_bytes:
            return False
        with path.open("rb") as file:
            return file.read(len(header)) == header


class Planner:
    """Plans the pieces of each tensor, and counts those of experts."""

    def __init__(
        self,
        skeleton: Any,
        keep: KeepMask,
        *,
        stacked: bool,
        padded: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        layers = find_experts(skeleton)
        keeps_of(layers, keep)  # checks that it is of this model
        if stacked:
            uniform_width(keep)
        self.skeleton, self.stacked, self.padded = skeleton, stacked, padded or {}
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
        """Prefixes of the names of tensors in experts modules."""
        self.seen: dict[tuple[str, int, int], str] = {}
        """Where each (parameter, expert, part) was found."""

    def files(self, stored: Stored) -> list[SlicedFile]:
        """The files to write.

        Raises:
            LayoutError: the weights are not those of the model.
        """
        every = list(find_tensors(self.skeleton, self.conversions, stored))
        # As a loaded model does when it is saved: undo the renamings that were used.
        used = [c.reverse_transform() for c in self.conversions[::-1] if c.was_used()]
        self.renamings = [c for c in used if isinstance(c, WeightRenaming)]
        known = self.skeleton.state_dict()
        pieces: dict[Path, list[Piece]] = {path: [] for path in stored}
        dropped = predicting(self.skeleton, every)
        for found in every:
            if found.name in dropped:
                continue
            weight = self.weights.get(found.parameter)
            if weight is not None:
                own, stored_as = _as_in_file(found, weight)
                _check_tensor(own, stored_as)
                pieces[found.file] += self._pieces(own, stored_as)
            elif found.parameter in known or not self._in_experts(found):
                pieces[found.file].append(self._copy(found))
            else:
                raise LayoutError(
                    f"{found} belongs to routed experts, but is none of their weights "
                    "and biases, so they are quantised or of another version; expected "
                    f"only {', '.join(FLOATS)} weights: dequantise the checkpoint"
                )
        self._check_complete()
        check_whole(self.skeleton, every, sliced=self.weights)
        return [
            SlicedFile(path, sorted(own, key=_place))
            for path, own in pieces.items()
            if own
        ]

    def _copy(self, found: FoundTensor) -> Piece:
        """A tensor that is not of routed experts.

        Raises:
            LayoutError: it gets zeros, but is joined with others when it is loaded.
        """
        wide = self.padded.get(found.parameter)
        if wide is not None and found.converter is not None:
            raise LayoutError(
                f"{found} becomes part of {found.parameter}, expected a tensor of its "
                "own, because zeros are added to it: load the model and prune it in "
                "memory instead"
            )
        return Piece(found.name, found.tensor, padded=wide)

    def _in_experts(self, found: FoundTensor) -> bool:
        return found.parameter.startswith(self.places)

    def _pieces(self, found: FoundTensor, weight: ExpertWeight) -> Iterator[Piece]:
        """The pieces of a tensor of experts."""
        start, n_experts = found.tensor.start, weight.shape[0]
        turned = weight.transposed and not self.stacked
        if found.converter is not None:
            expert = int([part for part in found.name.split(".") if part.isdigit()][-1])
            self._see(found, weight, expert=expert, part=found.part)
            yield Piece(
                found.name,
                found.tensor,
                weight=weight,
                experts=range(expert, expert + 1),
                start=start,
                transposed=turned,
                part=found.part,
            )
            return
        each = [(e, p) for e in range(n_experts) for p in range(weight.n_parts)]
        for expert, part in each:
            self._see(found, weight, expert=expert, part=part)
        if self.stacked:
            whole = Piece(
                found.name,
                found.tensor,
                weight=weight,
                experts=range(n_experts),
                start=start,
                parts=(True,) * weight.n_parts,
                stacked=True,
            )
            _refuse_square(whole, found, self.weights[found.parameter])
            yield whole
            return
        for expert, part in each:
            yield Piece(
                self._name(weight, expert=expert, part=part),
                found.tensor,
                weight=weight,
                experts=range(expert, expert + 1),
                start=start + expert * found.tensor.n_bytes // n_experts,
                parts=tuple(part == p for p in range(weight.n_parts)),
                transposed=turned,
                part=part,
            )

    def _name(self, weight: ExpertWeight, *, expert: int, part: int) -> str:
        name = weight.patterns[part].replace("*", str(expert))
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def _see(
        self, found: FoundTensor, weight: ExpertWeight, *, expert: int, part: int
    ) -> None:
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


def _as_in_file(
    found: FoundTensor, weight: ExpertWeight
) -> tuple[FoundTensor, ExpertWeight]:
    """A tensor and its weight, in the orientation of the file.

    Some families load experts in either orientation and transpose those that differ
    from the model's.
    """
    kinds = [type(op).__name__ for op in getattr(found.converter, "operations", [])]
    if kinds != ["Transpose"] or weight.axis is None:
        return found, weight
    found = replace(found, converter=None)
    first, *others = weight.shape
    if found.tensor.shape == weight.shape:
        return found, weight
    turned = replace(
        weight,
        shape=(first, *others[::-1]),
        axis=1 - weight.axis,
        transposed=not weight.transposed,
    )
    return found, turned


def _refuse_square(piece: Piece, found: FoundTensor, weight: ExpertWeight) -> None:
    """Check that transformers can tell the orientation of sliced experts.

    Raises:
        LayoutError: it cannot: they are turned in the file, and are square.
    """
    turned = piece.weight is not weight
    if turned and piece.shape[1] == piece.shape[2]:
        raise LayoutError(
            f"{found} would become square, {piece.shape}, and be loaded transposed: "
            "choose another width (--multiple)"
        )


def _place(piece: Piece) -> tuple[int, str]:
    """The sort key of safetensors' own writer."""
    return -ORDER.index(piece.tensor.dtype), piece.name


def _check_tensor(found: FoundTensor, weight: ExpertWeight) -> None:
    """Check that a tensor of experts can be sliced.

    Raises:
        LayoutError: it is quantised, has another shape, or is changed when loaded.
    """
    tensor, converter = found.tensor, found.converter
    if tensor.dtype not in FLOATS:
        raise LayoutError(
            f"{found} is quantised, expected one of {', '.join(FLOATS)}: dequantise "
            "the checkpoint"
        )
    if converter is not None:
        _check_joined(found, weight)
    expected = weight.shape if converter is None else weight.expert_shape()
    n_bytes = math.prod(expected) * np.dtype(FLOATS[tensor.dtype]).itemsize
    if (tensor.shape, tensor.n_bytes) != (expected, n_bytes):
        raise LayoutError(
            f"{found} has {tensor.n_bytes} bytes, the model expects {expected} and "
            f"{n_bytes}: it is of another model, or already pruned"
        )


def _check_joined(found: FoundTensor, weight: ExpertWeight) -> None:
    """Check that a tensor of one expert is joined with others unchanged.

    Raises:
        LayoutError: it is changed when it is loaded.
    """
    operations = found.converter.operations
    joins = [(type(op).__name__, getattr(op, "dim", None)) for op in operations]
    known = [("MergeModulelist", 0)]
    if weight.n_parts > 1 and weight.axis is not None:
        known.append(("Concatenate", weight.axis + 1))
    if joins != known or len(found.converter.source_patterns) != weight.n_parts:
        raise LayoutError(
            f"{found} becomes part of {weight.name} by {joins}, expected {known}: load "
            "the model and prune it in memory instead"
        )
