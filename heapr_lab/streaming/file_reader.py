"""The tensors in a checkpoint's files: what they become, and how they are read.

Tensors are read through transformers' own conversions, so that a part has the weights
that `from_pretrained` would give it, or none.
"""

import contextlib
import functools
import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from heapr_lab.errors import HeaprLabError, LayoutError
from heapr_lab.models.ragged_experts import check_no_missing_weights
from heapr_lab.models.safetensors_headers import StoredTensor, read_headers
from heapr_lab.streaming.quantisation import check_scales, unpacked_shape
from heapr_lab.streaming.stream import put_tensor, tensor_of

_RAISED = re.compile(r"^\w+Error: (.*)$", re.MULTILINE)
"""What a conversion raised, in transformers' text of it."""
FLOATS = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Types of weights that are not quantised."""
_ADVICE = 2**20
"""Bytes to advise at once: of more the system reads only the first."""
_COMPANIONS = re.compile(
    r"(_scale_inv|_scales|activation_scale|(weight|input)(_global)?_scale(_2)?"
    r"|\.[kv]_scale)\$?$"
)
"""Ends of names, and of patterns, of what comes with quantised weights alone."""


# --- what they become -------------------------------------------------------------


@dataclass(frozen=True)
class FoundTensor(StoredTensor):
    """A tensor in a file, and the parameter of the model that it becomes."""

    parameter: str
    converter: Any
    """The converter that joins it with other tensors, if there is one."""
    part: int
    """Its number among the joined tensors."""
    packed: tuple[StoredTensor, ...] = ()
    """What is in the file where this is in floats: numbers, and scales of each kind."""


def find_tensors(
    skeleton: Any, conversions: list[Any], stored: Mapping[str, StoredTensor]
) -> Iterator[FoundTensor]:
    """The tensors in the files, with what they become when loaded into `skeleton`."""
    known, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    owners: dict[Any, Any] = {p: c for c in converters for p in c.source_patterns}
    for name, tensor in stored.items():
        new, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if new not in known and name in known:
            new, pattern = rename_source_key(name, [], [], prefix, known)
        owner = owners.get(pattern)
        part = owner.source_patterns.index(pattern) if owner else 0
        becomes = {"parameter": new, "converter": owner, "part": part}
        yield FoundTensor(**vars(tensor) | becomes)


def check_whole(skeleton: Any, every: list[FoundTensor]) -> None:
    """Check that the files have every tensor that transformers loads into the model.

    Args:
        skeleton: the model, which may be on the meta device.
        every: the tensors in the files.

    Raises:
        LayoutError: a tensor is missing, has another shape, or is of a further layer.
    """
    known = skeleton.state_dict()
    parts: dict[str, Counter[int]] = {}
    for entry in every:
        parts.setdefault(entry.parameter, Counter()).update([entry.part])
    there = {
        name
        for entry in every
        if _is_whole(entry, parts[entry.parameter], known)
        for name in made_of(entry)
    }
    for pair in skeleton.all_tied_weights_keys.items():
        if there & set(pair):
            there |= set(pair)
    keys = SimpleNamespace(
        missing_keys=known.keys() - there,
        unexpected_keys=parts.keys() - known.keys(),
        mismatched_keys=set(),
    )
    try:
        skeleton._adjust_missing_and_unexpected_keys(keys)
        check_no_missing_weights(
            skeleton,
            missing=keys.missing_keys,
            mismatched=[f.parameter for f in every if differs(f, known)],
            unexpected=keys.unexpected_keys,
        )
    except ValueError as error:
        raise LayoutError(f"{every[0].file.parent}: {error}") from error


def made_of(entry: FoundTensor) -> Iterator[str]:
    """The parameters that a tensor becomes: several where it is split."""
    yield entry.parameter
    if entry.converter is not None:
        first, *others = entry.converter.target_patterns
        yield from (entry.parameter.replace(first, other) for other in others)


def _is_whole(
    entry: FoundTensor, parts: Counter[int], known: dict[str, torch.Tensor]
) -> bool:
    """Whether the files have all that a tensor is joined with, each expert's once."""
    if entry.converter is None:
        return True
    needed = _needed(entry.converter)
    stacks = [type(op).__name__ for op in entry.converter.operations]
    if "MergeModulelist" not in stacks or entry.parameter not in known:
        return needed <= parts.keys()
    return {parts[part] for part in needed} == {len(known[entry.parameter])}


def _needed(converter: Any) -> set[int]:
    """The parts without which a parameter is not whole."""
    patterns = enumerate(converter.source_patterns)
    return {number for number, name in patterns if not _COMPANIONS.search(name)}


def differs(entry: FoundTensor, known: dict[str, torch.Tensor]) -> bool:
    """Whether a tensor that is loaded unchanged differs from its parameter in shape."""
    if entry.converter is not None or entry.parameter not in known:
        return False
    return tuple(known[entry.parameter].shape) != entry.shape


def in_floats(every: list[FoundTensor], quantizer: Any) -> list[FoundTensor]:
    """The tensors with the names and shapes that they have without quantisation.

    Raises:
        LayoutError: as `check_scales`.
    """
    scales, floats = check_scales({e.name: e for e in every}, quantizer), []
    among = {scale.name for kinds in scales.values() for scale in kinds}
    for entry in every:
        if entry.name in scales:
            name = entry.name.replace(".weight_packed", ".weight")
            shape, packed = unpacked_shape(entry), (entry, *scales[entry.name])
            floats.append(
                replace(entry, name=name, dtype="BF16", shape=shape, packed=packed)
            )
        elif entry.name not in among and not _COMPANIONS.search(entry.name):
            floats.append(entry)
    return floats


# --- reading ----------------------------------------------------------------------


class FileReader:
    """Reads the tensors of a model from the files of a checkpoint."""

    def __init__(
        self,
        model: Any,
        folder: Path,
        conversions: list[Any],
        *,
        quantizer: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Read the headers of the files.

        Args:
            model: without weights.
            folder: with the files.
            conversions: of transformers, from their tensors to those of the model.
            quantizer: of transformers, which dequantises them, if any does.
            dtype: of the weights in memory.
            device: of the weights in memory.

        Raises:
            LayoutError: a tensor is missing.
        """
        self.n_bytes_read = 0
        """Bytes read from the files so far."""
        self._model, self._dtype, self._device = model, dtype, device
        model.requires_grad_(False)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        stored = read_headers(folder)
        self._files = {tensor.file: _state(tensor.file) for tensor in stored.values()}
        every = list(find_tensors(model, conversions, stored))
        check_whole(model, every)
        check_scales(stored, quantizer)
        self._tensors: dict[str, list[FoundTensor]] = {}
        """The tensors of which each parameter or buffer is made."""
        known = model.state_dict()
        for entry in every:
            if entry.parameter in known:  # not of layers that predict further tokens
                self._tensors.setdefault(entry.parameter, []).append(entry)
        self._quantizer = quantizer
        used = [conversion for conversion in conversions if conversion.was_used()]
        self._used = used if quantizer is None else None
        """The conversions to save the model with, as if it had been loaded at once."""

    def keep_types(self) -> None:
        """Have each tensor in memory in the type that the files have it in.

        A parameter that is joined from several types has one that holds all of them.
        """
        for tensors in self._tensors.values():
            stored = [entry.dtype for entry in tensors]
            kinds = [FLOATS[name] for name in stored if name in FLOATS]
            if len(kinds) == len(stored):
                kind = functools.reduce(torch.promote_types, kinds)
                for name in made_of(tensors[0]):
                    tensor = tensor_of(self._model, name)
                    if tensor.is_floating_point():
                        put_tensor(self._model, name, tensor.to(kind))

    @property
    def state(self) -> str:
        """A digest of the numbers, sizes and times of the files as they are now.

        Weights in memory may be those of a file, which change when it is written to.
        """
        now = {path: _state(path) for path in self._files}
        return hashlib.sha256(repr(sorted(now.items())).encode()).hexdigest()

    def tensors_of(self, names: Collection[str]) -> list[FoundTensor]:
        """The tensors in files of the parameters and buffers of these names."""
        return [entry for name in names for entry in self._tensors.get(name, [])]

    def read(self, _number: int, names: Collection[str]) -> None:
        """Read these tensors, those that are joined first and the largest of them.

        Joining takes as much memory again, which the others do not need yet.

        Raises:
            HeaprLabError: the files changed.
        """
        tensors = self.tensors_of(names)
        self._check_unchanged(tensors)
        groups = [self._tensors[name] for name in names if name in self._tensors]
        joined = [group for group in groups if group[0].converter is not None]
        unchanged = [entry for entry in tensors if entry.converter is None]
        with _without_bar():
            for group in sorted(joined, key=_n_bytes, reverse=True):
                self._read_together(group)
            if unchanged:
                self._read_together(unchanged)
        for name in names:
            tensor_of(self._model, name).requires_grad_(False)
        self._check_unchanged(tensors)  # since the check before they were opened
        self.n_bytes_read += _n_bytes(tensors)

    def prepare(self, names: Collection[str]) -> None:
        """Have the system read these tensors ahead, if it takes advice.

        A file that is shorter or gone is an error of `read`.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        for entry in self.tensors_of(names):
            start, end = entry.start, entry.start + entry.n_bytes
            with contextlib.suppress(OSError), entry.file.open("rb") as file:
                for at in range(start, end, _ADVICE):
                    n_bytes = min(_ADVICE, end - at)
                    os.posix_fadvise(file.fileno(), at, n_bytes, os.POSIX_FADV_WILLNEED)

    def _check_unchanged(self, tensors: Iterable[FoundTensor]) -> None:
        """Check that the files of `tensors` are those that the headers were read from.

        Raises:
            HeaprLabError: one was replaced, written to or deleted.
        """
        for path in {entry.file for entry in tensors}:
            now = _state(path)
            if now != self._files[path]:
                what = "was deleted" if now is None else "has changed"
                raise HeaprLabError(
                    f"{path} {what} since the model was opened, so its layers would be "
                    "of two models: load it again"
                )

    def _read_together(self, tensors: list[FoundTensor]) -> None:
        """Read the tensors of one parameter, or several that are read unchanged.

        They are converted in the type of the files, and the result is cast at once: a
        cast of each tensor before that would need as much memory again.

        Raises:
            LayoutError: they do not become what the model has, as where its
                configuration is of other weights.
        """
        files = {f.file for f in tensors}
        handles = {file: safe_open(file, framework="pt") for file in files}
        slices = {f.name: handles[f.file].get_slice(f.name) for f in tensors}
        converters = {id(f.converter): f.converter for f in tensors if f.converter}
        settings = LoadStateDictConfig(
            weight_mapping=[*self._renamings, *converters.values()],
            dtype=self._dtype,
            dtype_plan=self._model._get_dtype_plan(self._dtype),
            device_map={"": self._device},
            hf_quantizer=self._quantizer,
        )
        with _as_stored(self._model, tensors):
            info, *_ = convert_and_load_state_dict_in_model(
                self._model, slices, settings
            )
            self._model._weight_conversions = self._used
            del slices, handles  # their pages, before the cast takes as much again
            for name, text in info.conversion_errors.items():
                entries = [f for f in tensors if f.parameter == name] or tensors
                why = _RAISED.findall(text) or text.splitlines()
                raise LayoutError(f"{entries[0]}: {why[0]}")


@contextlib.contextmanager
def _as_stored(model: nn.Module, tensors: list[FoundTensor]) -> Iterator[None]:
    """The parameter that `tensors` are joined in has their type here, then its own."""
    name, converter = tensors[0].parameter, tensors[0].converter
    (stored, *others) = {entry.dtype for entry in tensors}
    joined = converter is not None and len(converter.target_patterns) == 1
    if not joined or others or stored not in FLOATS:
        yield
        return
    dtype = tensor_of(model, name).dtype
    put_tensor(model, name, tensor_of(model, name).to(FLOATS[stored]))
    yield
    put_tensor(model, name, tensor_of(model, name).to(dtype))


def _n_bytes(tensors: Iterable[FoundTensor]) -> int:
    return sum(entry.n_bytes for entry in tensors)


@contextlib.contextmanager
def _without_bar() -> Iterator[None]:
    """No progress bar of transformers, which would show one for each layer."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _state(path: Path) -> tuple[int, ...] | None:
    """Which file it is, and what changes with any write to it; None if it is gone."""
    if not path.exists():
        return None
    now = path.stat()
    return now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
