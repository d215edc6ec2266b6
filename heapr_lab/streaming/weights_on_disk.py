"""The parameter that each tensor in a checkpoint's files becomes when it is loaded."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from heapr_lab.errors import LayoutError
from heapr_lab.models.ragged_experts import check_no_missing_weights
from heapr_lab.models.safetensors_headers import Stored, StoredTensor


@dataclass(frozen=True)
class FoundTensor:
    """A tensor in a file, and the parameter of the model that it becomes."""

    file: Path
    name: str
    tensor: StoredTensor
    parameter: str
    converter: Any
    """The converter that joins it with other tensors, if there is one."""
    part: int
    """Its number among the joined tensors."""

    def __str__(self) -> str:
        return f"{self.file}: {self.name} ({self.tensor.dtype} {self.tensor.shape})"


def find_tensors(
    skeleton: Any, conversions: list[Any], stored: Stored
) -> Iterator[FoundTensor]:
    """The tensors in the files, with what they become when loaded into `skeleton`."""
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
            yield FoundTensor(file, name, tensor, new, owner, part)


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


_COMPANIONS = re.compile(
    r"(_scale_inv|activation_scale|_scales|weight_scale(_2)?|input_scale)\$?$"
)
"""Ends of the patterns of what comes with quantised weights, and only with them."""


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
    return tuple(known[entry.parameter].shape) != entry.tensor.shape
