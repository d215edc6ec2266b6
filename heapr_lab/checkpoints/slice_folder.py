"""Slice a dense checkpoint's folder into a pruned one, without loading the model."""

import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from heapr_lab.checkpoints.folder import new_folder, save_tokenizer
from heapr_lab.checkpoints.save import (
    describe,
    other_parts,
    padded_by,
    structure_of,
)
from heapr_lab.checkpoints.slice_files import begun, slice_files, stamps_of
from heapr_lab.checkpoints.uniform import Stock, stock_config, uniform_width
from heapr_lab.errors import HeaprLabError
from heapr_lab.models.experts import find_experts
from heapr_lab.models.folders import (
    has_tokenizer,
    read_config,
    read_tokenizer,
    skeleton_of,
)
from heapr_lab.models.predicting import what_is_dropped, without_predicting
from heapr_lab.models.ragged_experts import HeaprConfig, carry_code
from heapr_lab.progress import Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.storage import files

_PLAN_NAME = ".partial-plan.json"
"""In an unfinished folder: what is written there; deleted when it is complete."""


def prune_folder(
    source: Path,
    keep: KeepMask,
    folder: Path,
    *,
    base: str | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    check: Callable[[Path], Mapping[str, Any]] | None = None,
) -> Path:
    """Slice the files of the model in `source` into a checkpoint, tensor by tensor.

    The model is never loaded: memory holds one tensor at a time. The files are those
    that `save_pruned` writes for the same model in the same dtype. After an
    interruption, the same call resumes where it stopped.

    Args:
        source: a folder in the hub's layout, with an unpruned model in safetensors.
        keep: the kept atoms.
        folder: a new folder.
        base: name of the model for manifest and card; by default `source`.
        facts: as `save_pruned`.
        progress: called with (bytes done, bytes in all).
        check: as `save_pruned`; if it fails, nothing is kept to resume from.

    Raises:
        SpecError: `folder` is not empty, is not writable or is being written by
            another process; the mask is of another model; or `source` is damaged or
            lacks tensors.
        LayoutError: the model's experts cannot be sliced exactly.
        CacheError: the files of an interrupted call are of another mask or source, or
            changed while they were written.
    """
    config = read_config(source)
    structure = structure_of(keep)
    uniform = structure == "uniform"
    stock = Stock(copy.deepcopy(config), {}, 0)
    if uniform:
        stock = stock_config(config, uniform_width(keep, config.dtype))
    changed = stock.config
    skeleton: Any = skeleton_of(config)
    tokenizer = read_tokenizer(source) if has_tokenizer(source) else None
    with new_folder(folder, resume=True) as partial:
        plan = {
            "mask": keep.fingerprint,
            "structure": structure,
            "source": stamps_of(source.glob("*.safetensors")),
        }
        if not begun(partial / _PLAN_NAME, plan):  # before anything is written there
            files.write_json(partial / _PLAN_NAME, plan)
        if not uniform:
            _name_widths(changed, skeleton, keep)
            carry_code(partial, changed, type(skeleton).__name__)
        without_predicting(changed)
        changed.save_pretrained(partial)
        generation = source / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, partial / generation.name)
        said = {"tokenizer": save_tokenizer(partial, tokenizer, base=str(source))}
        said |= what_is_dropped(skeleton, str(source))
        said |= other_parts(skeleton, partial, base=str(source))
        said |= padded_by(stock.n_zero)
        # Last, because it is slow and would be repeated if a later step failed.
        checksums = slice_files(
            source,
            skeleton,
            keep,
            partial,
            stacked=uniform,
            padded=stock.padded,
            progress=progress,
        )
        said |= {} if check is None else _checked(partial, check)
        describe(
            partial,
            keep,
            base=base or str(source),
            config=changed,
            facts={**(facts or {}), **said},
            checksums=checksums,
            source=source,
        )
    return folder


def _checked(
    partial: Path, check: Callable[[Path], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The facts of `check`.

    Raises:
        HeaprLabError: it failed; the folder is deleted, because its files are wrong.
    """
    try:
        return check(partial)
    except HeaprLabError:
        shutil.rmtree(partial)
        raise


def _name_widths(config: Any, skeleton: nn.Module, keep: KeepMask) -> None:
    """Write to `config` what `attach` writes to a model's."""
    widths = {
        layer.name: keep.by_layer(layer.layer).sum(1).tolist()
        for layer in find_experts(skeleton)
    }
    config.architectures = [type(skeleton).__name__]
    config.quantization_config = HeaprConfig(widths, structure=structure_of(keep))
