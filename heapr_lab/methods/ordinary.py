"""A smaller model as an ordinary checkpoint of its family, where it is one."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from heapr_lab.checkpoints.folder import checksums_in, new_folder, save_tokenizer
from heapr_lab.checkpoints.provenance import MANIFEST_FILE
from heapr_lab.checkpoints.stored_type import in_dtype, stored_dtype
from heapr_lab.errors import SpecError
from heapr_lab.methods.composed_experts import ComposedExperts
from heapr_lab.methods.expert_axes import COUNTS
from heapr_lab.models.experts import find_experts
from heapr_lab.models.folders import skeleton_of
from heapr_lab.storage import files


def save_ordinary(
    small: Any,
    folder: Path | str,
    facts: Mapping[str, Any],
    *,
    tokenizer: Any = None,
    base: str | None = None,
) -> Path:
    """Write `small`, which was made of a dense model, with a manifest.

    Transformers and engines load it as any model of its family. Weights are in the type
    of the dense model's files, if these are on this machine.

    Args:
        small: a model with fewer experts, or other weights, after `renumber`.
        folder: a new folder.
        facts: plain data for the manifest, with the name of the `method`.
        tokenizer: the tokenizer to save; by default that of the dense model.
        base: name of the dense model; by default where it was loaded from.

    Returns:
        `folder`.

    Raises:
        SpecError: the family's configuration cannot express the experts, or `folder` is
            not empty or not writable.
        CacheError: the files changed while they were written.
    """
    if not _expresses(small.config, small):
        raise SpecError(
            f"{facts['method']} leaves experts that no configuration of "
            f"{type(small).__name__} can express. Expected dense experts, equally many "
            "in each layer: measure the model with apply, or materialise it"
        )
    base = base or small.config._name_or_path
    small = in_dtype(small, stored_dtype(small))
    with new_folder(Path(folder)) as partial:
        small.save_pretrained(partial)
        manifest = {
            **facts,
            "base_model": Path(base).name if Path(base).is_dir() else base,
            "tokenizer": save_tokenizer(partial, tokenizer, base=base),
            "sha256": checksums_in(partial),
        }
        files.write_json(partial / MANIFEST_FILE, manifest)
    return Path(folder)


def renumber(small: Any, *, like: nn.Module) -> None:
    """Set the number of experts in the configuration and the modules of `small`.

    Nothing changes where the family's configuration cannot express it. It may have
    several names for the number, and the model one of its own, for router losses.

    Args:
        small: a copy of `like` with fewer experts, or other weights.
        like: the dense model.
    """
    layers = find_experts(like)
    modules: list[Any] = [small.get_submodule(layer.name) for layer in layers]
    before = {layer.n_experts for layer in layers}
    after = {len(m.down_proj) for m in modules if not isinstance(m, ComposedExperts)}
    if len(before) != 1 or len(after) != 1 or before == after:
        return
    config = copy.deepcopy(small.config)
    _set_counts(config, *before, *after)
    if _expresses(config, small):
        _set_counts(small.config, *before, *after)
        for module in small.modules():
            for name in COUNTS:
                if vars(module).get(name) in before:
                    setattr(module, name, *after)


def _set_counts(config: Any, before: int, after: int) -> None:
    plain = config.get_text_config()
    for name, value in plain.to_dict().items():
        if "experts" in name and type(value) is int and value == before:
            setattr(plain, name, after)


def _expresses(config: Any, model: nn.Module) -> bool:
    """Whether `config` is that of a model with the shapes of `model`."""
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in each.state_dict().items()}
        for each in (skeleton_of(config), model)
    ]
    return shapes[0] == shapes[1]
