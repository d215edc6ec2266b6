"""Write a pruned checkpoint again in another format, or with quantised experts.

What the files are to contain is checked bit for bit with the files that were written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from heapr_lab.checkpoints.folder import checksums_in, new_folder, save_tokenizer
from heapr_lab.checkpoints.save import (
    HEAPR,
    KEEP_FILE,
    MANIFEST_VERSION,
    attach,
    check_format,
    save_pruned,
    write_weights,
    written_as,
)
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.experts import find_experts, sliced_experts
from heapr_lab.models.folders import has_tokenizer, read_tokenizer, read_weights
from heapr_lab.models.less_is_moe import FORMAT
from heapr_lab.models.ragged_experts import quantise
from heapr_lab.models.streamed import refuse_streamed
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import prune
from heapr_lab.storage import files
from heapr_lab.storage.provenance import MANIFEST_FILE

_NOT_CARRIED = (
    "format",
    "format_version",
    "keep_fingerprint",
    "sha256",
    "files",
    "reloaded",
)
"""What a manifest says of the files that it is beside."""
_SLICED = "sliced, otherwise unchanged"


def convert(
    folder: Path | str,
    out: Path | str,
    *,
    format: str = HEAPR,
    quantised: str | None = None,
) -> Path:
    """Write the pruned checkpoint in `folder` to `out`, in another format.

    With `quantised`, the experts' weights are rounded to integers with a scale for each
    group, symmetric, to nearest, and all others stay as they are. Any structure can be.

    A checkpoint of this package takes its mask, its card and what was measured along.
    One of Less-is-MoE that was made elsewhere does not say which atoms it kept: what is
    written of it loads, and has no mask and no card.

    Args:
        folder: with a pruned checkpoint, of this package or of Less-is-MoE.
        out: a new folder.
        format: `heapr` or `less-is-moe`.
        quantised: `int8` (a scale for each row of W_gate, W_up and column of W_down) or
            `int4` (for each 32 weights of one); by default weights stay as they are.

    Returns:
        `out`.

    Raises:
        SpecError: there is no pruned checkpoint in `folder`, there is no such format or
            kind, the format cannot carry the model, the experts are quantised already,
            or `out` is not empty.
        CacheError: the mask is not that of the weights, or what was written differs.
    """
    folder, out = Path(folder), Path(out)
    model, known = read_weights(folder, dtype="auto"), (folder / KEEP_FILE).is_file()
    if not known and not sliced_experts(model):
        raise SpecError(
            f"{folder} is not a pruned checkpoint: expected one of `heapr-lab prune`, "
            f"or of the format {FORMAT}"
        )
    model = _ragged(model)
    facts = _facts_of(folder, rounded=quantised is not None) if known else {}
    model.__dict__["heapr_weights"] = facts.pop("weights", _SLICED)
    if quantised is not None:
        quantise_model(model, quantised)
    check_format(format, model)
    tokenizer = read_tokenizer(folder) if has_tokenizer(folder) else None
    if known:
        return _with_mask(model, folder, out, tokenizer, facts, format=format)
    return _without_mask(model, folder, out, tokenizer, format=format)


def quantise_model(model: Any, kind: str) -> None:
    """Round the experts' weights of a pruned model to integers, in place.

    Args:
        model: of `prune`, or a pruned one that was loaded.
        kind: `int8` or `int4`, as in `convert`.

    Raises:
        SpecError: it has no pruned experts, they are quantised already, d_model is no
            multiple of the size of a group, or the model is streamed.
    """
    refuse_streamed(model, remedy="save it, and quantise the checkpoint (convert)")
    experts = sliced_experts(model)
    if not experts:
        raise SpecError(
            f"this {type(model).__name__} has no pruned experts: expected a model that "
            "heapr_lab.prune returned (its mask may keep every atom)"
        )
    for name, module in experts.items():
        try:
            quantise(module, kind)
        except ValueError as error:
            raise SpecError(f"{name}: {error}") from error
    was = getattr(model, "heapr_weights", _SLICED)
    model.__dict__["heapr_weights"] = f"{was}; those of experts rounded to {kind}"


def _ragged(model: Any) -> Any:
    """The model with experts of any widths, also where all widths are equal."""
    if sliced_experts(model):
        return model
    whole = {
        layer.layer: [[True] * layer.d_inter] * layer.n_experts
        for layer in find_experts(model)
    }
    return prune(model, KeepMask.from_arrays(whole))


def _facts_of(folder: Path, *, rounded: bool) -> dict[str, Any]:
    """What the manifest says that is true of the new files, too."""
    manifest = files.read_json(folder / MANIFEST_FILE)
    facts = {k: v for k, v in manifest.items() if k not in _NOT_CARRIED}
    if rounded and "perplexity" in facts:
        facts["perplexity_unrounded"] = facts.pop("perplexity")
    return facts


def _with_mask(
    model: Any,
    folder: Path,
    out: Path,
    tokenizer: Any,
    facts: Mapping[str, Any],
    *,
    format: str,
) -> Path:
    keep = KeepMask.read(folder / KEEP_FILE)
    widths = [w for layer in keep.layers for w in keep.by_layer(layer).sum(1).tolist()]
    own = [
        w for experts in sliced_experts(model).values() for w in experts.heapr_widths
    ]
    if widths != own:
        raise CacheError(
            f"{folder / KEEP_FILE} is not the mask of the weights beside it: its "
            "experts have other widths; take the file that was written with them"
        )
    model.__dict__["heapr_keep"] = keep
    model.config._name_or_path = facts["base_model"] or ""
    return save_pruned(
        model,
        out,
        tokenizer=tokenizer,
        source=folder,
        facts=facts,
        format=format,
        check=lambda written: _same(written, model),
    )


def _without_mask(
    model: Any, folder: Path, out: Path, tokenizer: Any, *, format: str
) -> Path:
    with new_folder(out) as partial:
        attach(model, "ragged", format)
        write_weights(model, partial, format=format)
        said = save_tokenizer(partial, tokenizer, base=str(folder))
        manifest = {
            "format_version": MANIFEST_VERSION,
            "method": f"unknown: converted from {FORMAT}",
            "base_model": None,
            "structure": "ragged",
            "tokenizer": said,
            **written_as(model, format),
            **_same(partial, model),
            "sha256": dict(checksums_in(partial)),
        }
        files.write_json(partial / MANIFEST_FILE, manifest)
    return out


def _same(written: Path, model: Any) -> Mapping[str, str]:
    """The fact `reloaded`, if every tensor in the files is that of `model`.

    Raises:
        CacheError: one is not.
    """
    found = _ragged(read_weights(written, dtype="auto")).state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(found.get(name, tensor.new_zeros(0)), tensor):
            raise CacheError(
                f"{name} is not in the written files as it was read: nothing is kept; "
                "free disk space, and convert again"
            )
    return {"reloaded": "every tensor equal to what was to be written"}
