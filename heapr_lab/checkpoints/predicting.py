"""Layers of a checkpoint that predict further tokens (MTP), which are not pruned.

Transformers leaves them out of a causal language model. Their experts were made for the
unpruned model and have its widths, so a pruned checkpoint is written without them, and
its configuration says that there are none.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers.conversion_mapping import get_model_conversion_mapping

from heapr_lab.errors import SpecError
from heapr_lab.models.safetensors_headers import INDEX, SINGLE, read_source
from heapr_lab.streaming.weights_on_disk import FoundTensor, find_tensors

_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names of the number of such layers in configurations."""
_MODULE = re.compile(r"(^|\.)mtp[._]")
_LAYER = re.compile(r"(.*?)layers\.(\d+)\.")


def _predicting(skeleton: Any, every: Iterable[FoundTensor]) -> set[str]:
    """The names in files of the tensors of such layers.

    Args:
        skeleton: the unpruned model, which may be on the meta device.
        every: the tensors in its files.
    """
    known = skeleton.state_dict()
    depths: dict[str, int] = {}
    for place in filter(None, map(_LAYER.match, known)):
        depths[place[1]] = max(depths.get(place[1], 0), 1 + int(place[2]))

    def is_one(name: str) -> bool:
        place = _LAYER.match(name)
        further = place is not None and int(place[2]) >= depths.get(place[1], 10**9)
        return name not in known and (further or _MODULE.search(name) is not None)

    return {found.name for found in every if is_one(found.parameter)}


def without_predicting(config: Any) -> None:
    """Let a configuration, and a wrapper's inner one, say that there are none."""
    for own in (config, config.get_text_config()):
        for name in _COUNTS:
            if getattr(own, name, None):
                setattr(own, name, 0)


def what_is_dropped(skeleton: Any, base: str) -> dict[str, str]:
    """What manifest and card say of them; nothing if `base` has none on this machine.

    Args:
        skeleton: the unpruned model, which may be on the meta device.
        base: its folder or hub id.
    """
    folder = Path(base)
    if base and not folder.is_dir():
        cached = [try_to_load_from_cache(base, name) for name in (SINGLE, INDEX)]
        paths = [Path(path) for path in cached if isinstance(path, str)]
        folder = paths[0].parent if paths else folder
    try:
        stored, _ = read_source(folder)
    except SpecError:
        return {}
    every = find_tensors(skeleton, get_model_conversion_mapping(skeleton), stored)
    names = sorted(_predicting(skeleton, every))
    if not names:
        return {}
    return {
        "dropped": f"{len(names)} tensors of layers that predict further tokens (MTP), "
        f"from {names[0]} to {names[-1]}"
    }
