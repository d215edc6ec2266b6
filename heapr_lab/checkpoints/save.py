"""Write a pruned model to a folder that transformers can load.

A folder is written under a temporary name and renamed when it is complete, by one
process at a time: a folder with its final name is finished. `heapr_keep.parquet` has
the mask, and `heapr_manifest.json` the settings and the SHA-256 of the weights, so that
a pruning can be repeated or audited.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

from heapr_lab.checkpoints import model_card
from heapr_lab.checkpoints.folder import (
    checksums_in,
    claim,
    drop_foreign_code,
    new_folder,
    save_processor,
    save_tokenizer,
)
from heapr_lab.checkpoints.mtp_head import further_layers
from heapr_lab.checkpoints.predicting import Further, add_heads, without_predicting
from heapr_lab.checkpoints.provenance import MANIFEST_FILE
from heapr_lab.checkpoints.stored_type import cast, dense_skeleton, file_types
from heapr_lab.checkpoints.uniform import layer_widths, stock_model, uniform_width
from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.models.backend import FileTypes, backend_of
from heapr_lab.models.experts import is_wrapper, sliced_experts
from heapr_lab.models.folders import has_tokenizer, is_native, read_tokenizer
from heapr_lab.models.formats import blocks_fit
from heapr_lab.models.ragged_experts import HeaprConfig, HeaprQuantizer, finish
from heapr_lab.models.sources import dtype_name, source_of
from heapr_lab.progress import Progress, no_report
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import STRUCTURES
from heapr_lab.pruning.surgery import prune
from heapr_lab.storage import files
from heapr_lab.streaming.opening import open_streamed
from heapr_lab.text.calibration import CalibrationSet

KEEP_FILE = "heapr_keep.parquet"
MANIFEST_VERSION = 1


def save_pruned(
    model: Any,
    folder: Path | str,
    *,
    tokenizer: Any = None,
    base: str | None = None,
    source: Path | None = None,
    facts: Mapping[str, Any] | None = None,
    max_shard_size: str = "5GB",
    dtype: torch.dtype | None = None,
    calibration: CalibrationSet | None = None,
    check: Callable[[Path], Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a model of `prune` with tokenizer, mask, manifest and card.

    `AutoModelForCausalLM.from_pretrained(folder)` (for a multimodal wrapper,
    `AutoModelForMultimodalLM`) loads it after `import heapr_lab`, or with
    `trust_remote_code=True` where heapr_lab is not installed. A mask of structure
    `uniform` becomes a stock checkpoint, which needs neither.

    One layer of a streamed model is in memory at a time, and where its weights are only
    sliced, the same call resumes after an interruption at the layer it had reached.

    Args:
        model: a model that `prune` returned; it may have been trained since.
        folder: a new folder.
        tokenizer: the tokenizer to save; by default that of the dense model.
        base: name of the dense model; by default where it was loaded from.
        source: folder of the dense model, whose tokenizer, processor and licence are
            copied; by default `base`.
        facts: plain data for manifest and card: `calibration`, `perplexity`
            ({corpus: (before, after)}), `savings` (as `savings_of`), `weights` (how
            they were changed, but for slicing; by default as `compensate` recorded).
        max_shard_size: largest size of a safetensors file; a streamed model has a file
            for each layer.
        dtype: that of the weights in the files; by default that of the dense model's
            files, if they are on this machine, else of `model`, which is not changed.
            By default weights in blocks of FP8 stay FP8 if the structure is uniform and
            the width a multiple of a block's.
        calibration: windows on which a layer that predicts a further token (MTP) is
            scored, to be as narrow as all others of a `uniform` checkpoint; without
            them, or where transformers cannot run it, it is left out of such a one.
        check: called with the folder when it can be loaded, before it has its name; it
            returns further facts. If it raises, nothing is left.
        progress: called with (parts written, parts in all) of a streamed model.

    Returns:
        `folder`.

    Raises:
        SpecError: `model` was not made by `prune`; `folder` is not empty, is not
            writable or is being written by another process; or the family's
            configuration cannot express a uniform mask.
        LayoutError: a part of a layer that predicts further tokens is missing.
        CacheError: the files changed while they were written, or those of an
            interrupted call are of another mask or source.

    Example:
        >>> save_pruned(prune(model, keep), "pruned")  # doctest: +SKIP
    """
    keep = _mask_of(model)
    base = base or model.config._name_or_path
    types = file_types(model, dtype)
    changed = _in_words(model, types)
    facts = ({} if changed is None else {"weights": changed}) | dict(facts or {})
    plan, origin = _plan_of(model, keep, types), str(source or base)
    written = cast(checkpoint_of(model, keep, types.dtype), types)
    further = further_layers(model, dense_skeleton(model), origin, calibration)
    with new_folder(Path(folder), resume=plan is not None) as partial:
        if plan is not None:
            claim(partial, plan)
        if n_zero := getattr(written, "heapr_zero_atoms", 0):
            zeros = f"{n_zero} zero atoms in the shared experts of each layer"
            facts |= {"padded": zeros}
        stock = getattr(written.config, "quantization_config", None) is None
        if stock and structure_of(keep) == "per_layer":
            facts |= {"stock": "the configuration has a width for each layer"}
        facts |= further.said
        options = {"max_shard_size": max_shard_size, "progress": progress or no_report}
        facts["sha256"] = _write_weights(written, partial, further, types, **options)
        facts |= {"tokenizer": save_tokenizer(partial, tokenizer, base=origin)}
        facts |= _other_parts(model, partial, base=origin)
        drop_foreign_code(partial)
        facts |= {} if check is None else _checked(partial, check)
        describe(partial, keep, written.config, facts, base=base, source=source)
    return Path(folder)


def prune_folder(
    source: Path, keep: KeepMask, folder: Path, *, base: str = "", **options: Any
) -> Path:
    """Write the model in the folder `source` without the atoms outside `keep`.

    It is streamed, each tensor in the type that it has in the files: kept weights are
    written as they are. The other arguments, and errors, are those of `save_pruned`.
    """
    dense = open_streamed(source, dtype=None, device=torch.device("cpu"))
    smaller = prune(dense, keep)
    options["tokenizer"] = read_tokenizer(source) if has_tokenizer(source) else None
    return save_pruned(
        smaller, folder, base=base or str(source), source=source, **options
    )


def _in_words(model: Any, types: FileTypes) -> str | None:
    """How the weights differ from those of the dense model's files, in words.

    Args:
        model: a model that `prune` returned.
        types: those that they are written in.
    """
    changed: str | None = getattr(model, "heapr_weights", None)
    source = source_of(model)
    if source is None or source.dequantised_from is None:
        return changed
    text = f"{changed or 'sliced, otherwise unchanged'}, "
    if types.packing is not None:
        return f"{text}in FP8: those that changed are quantised again"
    text += f"dequantised from {source.dequantised_from} to {dtype_name(types.dtype)}"
    if source.block is None or blocks_fit(source.block, _mask_of(model).one_width):
        return text
    n = math.lcm(*source.block)
    return f"{text} (FP8 needs the structure uniform and widths in multiples of {n})"


def _plan_of(model: Any, keep: KeepMask, types: FileTypes) -> dict[str, str] | None:
    """What identifies files that can be resumed: slices of a streamed model's."""
    backend = backend_of(model)
    state = backend.sliced_from()
    if state is None or getattr(model, "heapr_weights", None) is not None:
        return None
    dtype = backend.dtype(model.get_input_embeddings().weight)
    return {
        "mask": keep.fingerprint,
        "structure": structure_of(keep),
        "source": state,
        "dtype": f"{dtype}, stored in {types.dtype}"
        + (" and FP8" if types.packing else ""),
    }


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


def _other_parts(model: Any, folder: Path, *, base: str) -> dict[str, str]:
    """What manifest and card say of a wrapper, whose processor is copied; else nothing.

    Args:
        model: the dense or the pruned model.
        folder: the one that the processor is copied to.
        base: folder or hub id of the dense model.
    """
    if not is_wrapper(model.config):
        return {}
    inside = type(model.get_decoder()).__name__
    part = (
        f"the language model ({inside}) of a {type(model).__name__}; all other parts "
        "are unchanged"
    )
    return {"pruned": part, "processor": save_processor(folder, base=base)}


def _mask_of(model: Any) -> KeepMask:
    keep = getattr(model, "heapr_keep", None)
    if not isinstance(keep, KeepMask):
        raise SpecError(
            f"this {type(model).__name__} carries no keep mask: expected a model that "
            "heapr_lab.prune returned"
        )
    return keep


def structure_of(keep: KeepMask) -> str:
    """The structure of the widths of `keep`; ragged if not recorded."""
    structure = str(keep.settings.get("structure", "ragged"))
    return structure if structure in STRUCTURES else "ragged"


def _write_weights(
    model: Any, folder: Path, further: Further, types: FileTypes, **options: Any
) -> dict[str, str]:
    """Write weights and config.json of what `checkpoint_of` prepared.

    Args:
        model: the model.
        folder: an empty one, or that of an interrupted call.
        further: the layers that predict further tokens.
        types: how the weights are written.
        **options: those of `Backend.write`.

    Returns:
        The SHA-256 of each file of weights.
    """
    if not further.heads:
        without_predicting(model.config)
    known = backend_of(model).write(model, folder, **options)
    if types.packing is not None:
        types.packing.settle(folder)
    added = add_heads(folder, further, model, types.packing) if further.heads else {}
    return known | added if known else checksums_in(folder)


def checkpoint_of(model: Any, keep: KeepMask, dtype: torch.dtype) -> Any:
    """`model`, ready for `save_pretrained`: stock if it can be, else with `attach`."""
    if structure_of(keep) == "uniform":
        return stock_model(model, uniform_width(keep, dtype))
    if structure_of(keep) == "per_layer":
        widths = layer_widths(model.config, keep, dtype)
        if widths is not None:
            return stock_model(model, widths)
    attach(model, structure_of(keep))
    return model


def attach(model: Any, structure: str) -> None:
    """Make transformers save the ragged experts of `model` in the form it loads.

    A model that was loaded in this format is saved as it was.
    """
    experts = sliced_experts(model)
    widths = {name: module.heapr_widths for name, module in experts.items()}
    quantizer = HeaprQuantizer(HeaprConfig(widths, structure=structure))
    loaded = getattr(model, "hf_quantizer", None)
    if type(loaded) is type(quantizer):
        return
    family = None if loaded is not None else getattr(model, "_weight_conversions", None)
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


# --- the folder -------------------------------------------------------------------


def describe(
    folder: Path,
    keep: KeepMask,
    config: Any,
    facts: Mapping[str, Any],
    *,
    base: str,
    source: Path | None,
) -> None:
    """Write mask, manifest and card of a checkpoint whose weights are in `folder`.

    `facts` has the SHA-256 of each file of weights, among others.
    """
    keep.write(folder / KEEP_FILE)
    weights = sorted(folder.glob("*.safetensors"))
    manifest = {
        "format_version": MANIFEST_VERSION,
        "method": keep.settings.get("method", "HEAPr"),
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
        "files": {path.name: path.stat().st_size for path in weights},
    }
    files.write_json(folder / MANIFEST_FILE, manifest)
    card = model_card.card(
        manifest, source=source or Path(base), native=is_native(config)
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
