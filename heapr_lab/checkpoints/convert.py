"""Write a pruned checkpoint again with quantised experts.

What the files are to contain is checked bit for bit with the files that were written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from heapr_lab.checkpoints.folder import read_manifest
from heapr_lab.checkpoints.save import KEEP_FILE, save_pruned
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import find_experts, sliced_experts
from heapr_lab.models.folders import has_tokenizer, read_tokenizer, read_weights
from heapr_lab.models.ragged_experts import quantise
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import prune

_NOT_CARRIED = (
    "format_version",
    "structure",
    "selection",
    "keep_fingerprint",
    "atoms",
    "atoms_kept",
    "sha256",
    "files",
    "reloaded",
)
"""What a manifest says of the files that it is beside, the mask among them."""
_SLICED = "sliced, otherwise unchanged"


def convert(folder: Path | str, out: Path | str, *, quantised: str) -> Path:
    """Write the pruned checkpoint in `folder` to `out`, with quantised experts.

    The experts' weights are rounded to integers with a scale for each group, symmetric,
    to nearest, and all others stay as they are. Any structure can be. The mask, the
    card and what was measured go along.

    Args:
        folder: with a pruned checkpoint.
        out: a new folder.
        quantised: `int8` (a scale for each row of W_gate, W_up and column of W_down) or
            `int4` (for each 32 weights of one).

    Returns:
        `out`.

    Raises:
        SpecError: there is no pruned checkpoint in `folder`, there is no such kind, the
            experts are quantised already, a weight is not finite, or `out` is not
            empty.
        CacheError: the manifest is damaged, the mask is not that of the weights, or
            what was written differs.
    """
    folder, out = Path(folder), Path(out)
    if not (folder / KEEP_FILE).is_file():
        raise SpecError(
            f"{folder} is not a pruned checkpoint: expected one of `heapr-lab prune`"
        )
    model = _ragged(read_weights(folder, dtype="auto"))
    manifest = read_manifest(folder)
    facts = _facts_of(manifest)
    model.__dict__["heapr_weights"] = facts.pop("weights", _SLICED)
    quantise_model(model, quantised)
    model.__dict__["heapr_keep"] = _mask_of(folder, model, manifest)
    model.config._name_or_path = facts["base_model"] or ""
    return save_pruned(
        model,
        out,
        tokenizer=read_tokenizer(folder) if has_tokenizer(folder) else None,
        source=folder,
        facts=facts,
        dtype=model.dtype,
        check=lambda written: _same(written, model),
    )


def quantise_model(model: Any, kind: str) -> None:
    """Round the experts' weights of a pruned model to integers, in place.

    Args:
        model: of `prune`, or a pruned one that was loaded.
        kind: `int8` or `int4`, as in `convert`.

    Raises:
        SpecError: it has no pruned experts, they are quantised already, d_model is no
            multiple of the size of a group, a weight is not finite, or the model is
            streamed.
    """
    backend_of(model).require_loaded(
        remedy="save it, and quantise the checkpoint (convert)"
    )
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


def _facts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says that is true of the new files, too."""
    facts = {k: v for k, v in manifest.items() if k not in _NOT_CARRIED}
    if "perplexity" in facts:
        facts["perplexity_unrounded"] = facts.pop("perplexity")
    return facts


def _mask_of(folder: Path, model: Any, manifest: Mapping[str, Any]) -> KeepMask:
    """The mask in `folder`.

    Raises:
        CacheError: it is not the one that `manifest` is of, or the experts of `model`,
            read from there, have other widths.
    """
    keep = KeepMask.read(folder / KEEP_FILE)
    widths = [w for layer in keep.layers for w in keep.by_layer(layer).sum(1).tolist()]
    own = [
        w for experts in sliced_experts(model).values() for w in experts.heapr_widths
    ]
    if widths != own or keep.fingerprint != manifest["keep_fingerprint"]:
        differ = "atoms" if widths == own else "widths"
        raise CacheError(
            f"{folder / KEEP_FILE} is not the mask of the weights beside it: its "
            f"experts have other {differ}; take the file that was written with them"
        )
    return keep


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
