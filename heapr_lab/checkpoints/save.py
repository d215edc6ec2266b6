"""Write a pruned model to a folder that transformers, and people, can use.

A folder is made under a temporary name and renamed when it is whole: one that has its
name is finished. One process at a time makes it. `heapr_keep.parquet` has the mask and
`heapr_manifest.json` what was done, so that a pruning can be repeated or audited, with
the SHA-256 of the weights.
"""

import contextlib
import glob
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

from heapr_lab.checkpoints import model_card
from heapr_lab.checkpoints.slice_files import begun, slice_files, stamps_of
from heapr_lab.checkpoints.uniform import (
    skeleton_of,
    stock_config,
    stock_model,
    uniform_width,
)
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models import ragged_experts
from heapr_lab.models.experts import find_experts
from heapr_lab.models.folders import has_tokenizer, read_config, read_tokenizer
from heapr_lab.models.ragged_experts import (
    HeaprConfig,
    HeaprQuantizer,
    RaggedExperts,
    finish,
)
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.storage import cache
from heapr_lab.storage.provenance import MANIFEST_FILE

KEEP_FILE = "heapr_keep.parquet"
MANIFEST_VERSION = 1
_PLAN_NAME = ".partial-plan.json"
"""In an unfinished folder: what is made there; deleted when it gets its name."""
_OWN = re.compile(r"\.partial-[0-9a-f]{8}-")
"""How the name begins of a folder that is made in one go."""
STRUCTURES = ("ragged", "aligned", "per_layer", "uniform")


def save_pruned(
    model: Any,
    folder: Path | str,
    *,
    tokenizer: Any = None,
    base: str | None = None,
    source: Path | None = None,
    facts: Mapping[str, Any] | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a model of `prune` with tokenizer, mask, manifest and card.

    `AutoModelForCausalLM.from_pretrained(folder)` loads it again once heapr_lab is
    imported, or with `trust_remote_code=True` where it is not installed. A mask that
    was selected as `uniform` becomes a stock checkpoint, which needs neither.

    Args:
        model: what `prune` returned; its weights may have been trained on since.
        folder: a new folder.
        tokenizer: to be saved with it; by default that of the model it was made from.
        base: name of the model it was made from; by default where that was loaded from.
        source: folder of that model, whose licence is carried over; by default `base`.
        facts: plain data for manifest and card: `calibration`, `perplexity`
            ({corpus: (before, after)}), `savings` (as `architecture.summary`),
            `weights` (what changed them besides slicing; by default what
            `compensate` noted).
        max_shard_size: largest size of a safetensors file.

    Returns:
        `folder`.

    Raises:
        SpecError: `model` was not made by `prune`, `folder` is not empty, cannot be
            written or is being written by another, or a uniform mask cannot be said in
            the family's configuration.
        CacheError: the folder is not what was written there.

    Example:
        >>> save_pruned(prune(model, keep), "pruned")  # doctest: +SKIP
    """
    keep = _mask_of(model)
    base = base or model.config._name_or_path
    changed = getattr(model, "heapr_weights", None)
    facts = ({} if changed is None else {"weights": changed}) | dict(facts or {})
    with new_folder(Path(folder)) as partial:
        written = checkpoint_of(model, keep)
        written.save_pretrained(partial, max_shard_size=max_shard_size)
        facts |= {"tokenizer": save_tokenizer(partial, tokenizer, base=base)}
        describe(
            partial,
            keep,
            base=base,
            config=model.config,
            facts=facts,
            checksums=checksums_in(partial),
            source=source,
        )
    return Path(folder)


def _mask_of(model: Any) -> KeepMask:
    keep = getattr(model, "heapr_keep", None)
    if not isinstance(keep, KeepMask):
        raise SpecError(
            f"this {type(model).__name__} carries no keep mask: expected a model that "
            "heapr_lab.prune returned"
        )
    return keep


def structure_of(keep: KeepMask) -> str:
    """How the widths of `keep` were constrained; ragged where it does not say."""
    found = str(keep.settings.get("structure", "ragged"))
    return found if found in STRUCTURES else "ragged"


def checkpoint_of(model: Any, keep: KeepMask) -> Any:
    """`model`, ready for `save_pretrained`: stock if uniform, else with its widths."""
    if structure_of(keep) == "uniform":
        return stock_model(model, uniform_width(keep, model.dtype))
    attach(model, structure_of(keep))
    return model


def attach(model: Any, structure: str) -> None:
    """Let transformers save the ragged experts of `model` as it loads them."""
    if getattr(model, "hf_quantizer", None) is not None:
        return  # it was loaded from a checkpoint, and is saved like one
    widths = {
        name: module.heapr_widths
        for name, module in model.named_modules()
        if isinstance(module, RaggedExperts)
    }
    quantizer = HeaprQuantizer(HeaprConfig(widths, structure=structure))
    family = getattr(model, "_weight_conversions", None)
    if family is None:
        family = [
            conversion
            for conversion in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(conversion, PrefixChange)
        ]
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantizer.quantization_config
    model._weight_conversions = quantizer.update_weight_conversions(family, model)
    finish(model)


def prune_folder(
    source: Path,
    keep: KeepMask,
    folder: Path,
    *,
    base: str | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Slice the files of the model in `source` into a checkpoint, tensor by tensor.

    The model is never built: memory holds one tensor at a time. The files are those
    that `save_pruned` writes of the same model in the same dtype. Interrupted, it goes
    on where it stopped when it is asked for the same again.

    Args:
        source: a folder in the hub's layout, of an unpruned model in safetensors.
        keep: what stays.
        folder: a new folder.
        base: name of the model for manifest and card; by default `source`.
        facts: as `save_pruned`.
        progress: called with (bytes done, bytes in all).

    Raises:
        SpecError: `folder` is not empty, cannot be written or is being written by
            another, the mask is of another model, or `source` is damaged or lacks
            tensors.
        LayoutError: the model's experts cannot be sliced exactly.
        CacheError: what an interrupted call left is of another mask or source, or the
            folder is not what was written there.
    """
    config = read_config(source)
    uniform = structure_of(keep) == "uniform"
    width = uniform_width(keep, config.dtype) if uniform else None
    changed = config if width is None else stock_config(config, width)
    skeleton: Any = skeleton_of(config)
    tokenizer = read_tokenizer(source) if has_tokenizer(source) else None
    with new_folder(folder, resume=True) as partial:
        plan = {
            "mask": keep.fingerprint,
            "structure": structure_of(keep),
            "source": stamps_of(source.glob("*.safetensors")),
        }
        if not begun(partial / _PLAN_NAME, plan):  # before anything is written there
            cache.write_json(partial / _PLAN_NAME, plan)
        if not uniform:
            _name_widths(changed, skeleton, keep)
            shutil.copyfile(
                ragged_experts.__file__, partial / f"{ragged_experts.CODE_NAME}.py"
            )
        changed.save_pretrained(partial)
        generation = source / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, partial / generation.name)
        said = save_tokenizer(partial, tokenizer, base=str(source))
        # Last, because it takes long and would be done again if a later step failed.
        checksums = slice_files(
            source, skeleton, keep, partial, stacked=uniform, progress=progress
        )
        describe(
            partial,
            keep,
            base=base or str(source),
            config=config,
            facts={**(facts or {}), "tokenizer": said},
            checksums=checksums,
            source=source,
        )
    return folder


def _name_widths(config: Any, skeleton: nn.Module, keep: KeepMask) -> None:
    """Say in `config` what `attach` says in a model's."""
    widths = {
        layer.name: keep.by_layer(layer.layer).sum(1).tolist()
        for layer in find_experts(skeleton)
    }
    code = f"{ragged_experts.CODE_NAME}.{type(skeleton).__name__}"
    config.auto_map = {"AutoModelForCausalLM": code}
    config.architectures = [type(skeleton).__name__]
    config.quantization_config = HeaprConfig(widths, structure=structure_of(keep))


# --- the folder -------------------------------------------------------------------


def partial_of(folder: Path) -> Path:
    """Where `folder` is made before it has its name, if that can be resumed."""
    return folder.with_name(f".partial-{folder.name}")


def check_new(folder: Path) -> None:
    """Make sure, before anything is measured, that a checkpoint can be made there.

    Raises:
        SpecError: `folder` is there and not empty, is being written by another, or
            cannot be written.
    """
    _check_empty(folder)
    place = folder.resolve()
    if place.parent.is_dir():
        with cache.writing(place):
            pass


def _check_empty(folder: Path) -> None:
    """Make sure that nothing is in `folder`.

    Raises:
        SpecError: something is.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(
            f"{folder} is there and not empty: give a new folder for the checkpoint, "
            "or delete this one"
        )


@contextlib.contextmanager
def new_folder(folder: Path, *, resume: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `folder` if the block succeeds.

    With `resume` it stays when the block fails, and is found again the next time.

    Raises:
        SpecError: `folder` is there and not empty, is being written by another, or
            cannot be written.
        CacheError: it is not what was written there.
    """
    folder = folder.resolve()
    with cache.writing(folder):
        _check_empty(folder)
        partial = partial_of(folder) if resume else _own_partial(folder)
        try:
            partial.mkdir(exist_ok=resume)
            yield partial
        except BaseException as error:
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError | SafetensorError):
                raise SpecError(
                    f"{folder} could not be written: {error}. What was there before "
                    "is untouched; make room, or give another folder"
                ) from error
            raise
        _name(partial, folder)
        _check_named(folder)


def _own_partial(folder: Path) -> Path:
    """A name that no other call has; what killed ones left unfinished is deleted."""
    for left in folder.parent.glob(f".partial-*-{glob.escape(folder.name)}"):
        if (
            _OWN.fullmatch(left.name.removesuffix(folder.name))
            and not (left / MANIFEST_FILE).exists()
        ):
            shutil.rmtree(left, ignore_errors=True)
    return folder.with_name(f".partial-{secrets.token_hex(4)}-{folder.name}")


def _name(partial: Path, folder: Path) -> None:
    """Give a finished folder its name.

    Raises:
        SpecError: something has it by now.
    """
    for left in partial.glob(".partial-*"):  # of a call that was killed
        left.unlink()
    cache.share_mode(partial, like=partial / MANIFEST_FILE)
    try:
        if folder.exists():
            folder.rmdir()
        partial.replace(folder)
    except OSError as error:
        raise SpecError(
            f"{folder} appeared while it was written and is left as it is; the "
            f"finished checkpoint is in {partial}: rename that"
        ) from error


def _check_named(folder: Path) -> None:
    """Check that the weights in `folder` are those that its manifest tells of.

    Raises:
        CacheError: they are not.
    """
    told = cache.read_json(folder / MANIFEST_FILE)["sha256"]
    found = checksums_in(folder)
    differing = sorted(n for n in told | found if told.get(n) != found.get(n))
    if differing:
        raise CacheError(
            f"{folder / differing[0]} is not what was written there: another process, "
            "or the disk, changed it; delete the folder and make it again"
        )


def checksums_in(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of weights in `folder`."""
    files = sorted(folder.glob("*.safetensors"))
    return {path.name: cache.checksum(path) for path in files}


def save_tokenizer(folder: Path, tokenizer: Any, *, base: str) -> str:
    """Write `tokenizer`, or that of the model `base`; what the manifest says of it."""
    if tokenizer is None and base:
        try:
            tokenizer = read_tokenizer(base)
        except SpecError as error:
            # A card is read elsewhere, where this machine's folders say nothing.
            return f"none: {str(error).replace(base, Path(base).name)}"
    if tokenizer is None:
        return "none: no tokenizer was given, and the base model has no name"
    tokenizer.save_pretrained(folder)
    return "saved with the weights"


def describe(
    folder: Path,
    keep: KeepMask,
    *,
    base: str,
    config: Any,
    facts: Mapping[str, Any],
    checksums: Mapping[str, str],
    source: Path | None = None,
) -> None:
    """Write mask, manifest and card of a checkpoint whose weights are in `folder`.

    `checksums` has the SHA-256 of each file of weights.
    """
    keep.write(folder / KEEP_FILE)
    files = sorted(folder.glob("*.safetensors"))
    manifest = {
        "format_version": MANIFEST_VERSION,
        "method": "HEAPr",
        "base_model": Path(base).name if Path(base).is_dir() else base,
        "base_revision": getattr(config, "_commit_hash", None),
        "architecture": (config.architectures or [None])[0],
        "structure": structure_of(keep),
        "selection": keep.settings,
        "keep_fingerprint": keep.fingerprint,
        "atoms": keep.n_atoms,
        "atoms_kept": keep.n_kept,
        "weights": "sliced, otherwise unchanged",
        **facts,
        "files": {path.name: path.stat().st_size for path in files},
        "sha256": dict(checksums),
    }
    cache.write_json(folder / MANIFEST_FILE, manifest)
    card = model_card.card(manifest, source=source or Path(base))
    (folder / "README.md").write_text(card, encoding="utf-8")
