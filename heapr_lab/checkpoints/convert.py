"""Write a pruned checkpoint again in another format.

Weights are the same bit for bit, which is checked with the files that were written.
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
)
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.experts import find_experts, sliced_experts
from heapr_lab.models.folders import has_tokenizer, read_tokenizer, read_weights
from heapr_lab.models.less_is_moe import FORMAT
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


def convert(folder: Path | str, out: Path | str, *, format: str) -> Path:
    """Write the pruned checkpoint in `folder` to `out`, in another format.

    A checkpoint of this package takes its mask, its card and what was measured along.
    One of Less-is-MoE that was made elsewhere does not say which atoms it kept: what is
    written of it loads, and has no mask and no card.

    Args:
        folder: with a pruned checkpoint, of this package or of Less-is-MoE.
        out: a new folder.
        format: `heapr` or `less-is-moe`.

    Returns:
        `out`.

    Raises:
        SpecError: there is no pruned checkpoint in `folder`, there is no such format,
            it cannot carry the model, or `out` is not empty.
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
    check_format(format, model)
    tokenizer = read_tokenizer(folder) if has_tokenizer(folder) else None
    write = _with_mask if known else _without_mask
    return write(model, folder, out, tokenizer, format=format)


def _ragged(model: Any) -> Any:
    """The model with experts of any widths, also where all widths are equal."""
    if sliced_experts(model):
        return model
    whole = {
        layer.layer: [[True] * layer.d_inter] * layer.n_experts
        for layer in find_experts(model)
    }
    return prune(model, KeepMask.from_arrays(whole))


def _with_mask(
    model: Any, folder: Path, out: Path, tokenizer: Any, *, format: str
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
    manifest = files.read_json(folder / MANIFEST_FILE)
    model.__dict__["heapr_keep"] = keep
    model.config._name_or_path = manifest["base_model"] or ""
    return save_pruned(
        model,
        out,
        tokenizer=tokenizer,
        source=folder,
        facts={k: v for k, v in manifest.items() if k not in _NOT_CARRIED},
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
            **({} if format == HEAPR else {"format": format}),
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
    return {"reloaded": "every tensor equal to that of the files it was converted from"}
