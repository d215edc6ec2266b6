"""Layers of a checkpoint that predict further tokens (MTP), which are not pruned.

Transformers leaves them out of a causal language model, so that they are copied from
file to file. Their experts have the widths of the unpruned model, and a stock
configuration has one width for all layers: a `uniform` checkpoint is written without
them, and its configuration says that there are none.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping

from heapr_lab.errors import SpecError
from heapr_lab.models.safetensors_headers import FLOATS, INDEX, SINGLE, read_headers
from heapr_lab.storage import files
from heapr_lab.streaming.shards import index_of
from heapr_lab.streaming.sizes import PREDICTING
from heapr_lab.streaming.weights_on_disk import FoundTensor, find_tensors

_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names of the number of such layers in configurations."""
_LAYER = re.compile(r"(.*?)layers\.(\d+)\.")
_OWN_FILE = "model-mtp.safetensors"
_FIRST = "model-00001-of-00001.safetensors"
"""The name of a single file of weights once there is another one beside it."""

Heads = Sequence[FoundTensor]
"""The tensors of such layers, in their files."""


def predicting_heads(skeleton: Any, base: str) -> Heads:
    """The layers of a model's files; none if they are not on this machine.

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
        stored, _ = read_headers(folder)
    except SpecError:
        return []
    known = skeleton.state_dict()
    depths: dict[str, int] = {}
    for place in filter(None, map(_LAYER.match, known)):
        depths[place[1]] = max(depths.get(place[1], 0), 1 + int(place[2]))

    def is_one(name: str) -> bool:
        place = _LAYER.match(name)
        further = place is not None and int(place[2]) >= depths.get(place[1], 10**9)
        return name not in known and (further or PREDICTING.search(name) is not None)

    every = find_tensors(skeleton, get_model_conversion_mapping(skeleton), stored)
    return [found for found in every if is_one(found.parameter)]


def are_floats(heads: Heads) -> bool:
    """Whether they can stand in a checkpoint that says nothing of quantised weights."""
    return all(found.tensor.dtype in FLOATS for found in heads)


def said_of(heads: Heads, *, kept: bool) -> dict[str, str]:
    """What manifest and card say of such layers; nothing if there are none."""
    names = sorted(found.name for found in heads)
    if not names:
        return {}
    said = f"{len(names)} tensors of layers that predict further tokens (MTP), from "
    said += f"{names[0]} to {names[-1]}"
    return {"kept": f"{said}, not pruned"} if kept else {"dropped": said}


def without_predicting(config: Any) -> None:
    """Let a configuration, and a wrapper's inner one, say that there are none."""
    for own in (config, config.get_text_config()):
        for name in _COUNTS:
            if getattr(own, name, None):
                setattr(own, name, 0)


def add_heads(folder: Path, heads: Heads) -> dict[str, str]:
    """Copy such layers to the checkpoint in `folder`, as they are in their files.

    Returns:
        The SHA-256 of the file that they are in; the weights beside it are
        unchanged, but for the name of a single file.
    """
    tensors: dict[str, Any] = {}
    for found in heads:
        with safe_open(found.file, framework="pt") as opened:
            tensors[found.name] = opened.get_tensor(found.name)
    save_file(tensors, folder / _OWN_FILE, metadata={"format": "pt"})
    if (folder / SINGLE).is_file():
        (folder / SINGLE).rename(folder / _FIRST)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    files.write_json(folder / INDEX, index_of(folder, names))
    return {_OWN_FILE: files.checksum(folder / _OWN_FILE)}
