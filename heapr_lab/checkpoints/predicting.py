"""Layers of a checkpoint that predict further tokens (MTP): kept, pruned or dropped.

Transformers leaves them out of a causal language model, so that they are copied from
file to file, as wide as they are. A stock configuration has one width for all layers:
in a `uniform` checkpoint they are pruned to it where they can be scored; else they are
dropped, and the configuration says that there are none. Without experts they are kept.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import save_file

from heapr_lab.checkpoints.stored_type import Fp8Files, conversions_of, read_tensor
from heapr_lab.checkpoints.uniform import fit
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.safetensors_headers import INDEX, PREDICTING, SINGLE, read_headers
from heapr_lab.storage import files
from heapr_lab.streaming.file_reader import FLOATS, FoundTensor, find_tensors, in_floats
from heapr_lab.streaming.on_disk import write_index
from heapr_lab.streaming.opening import quantizer_in
from heapr_lab.streaming.quantisation import Fp4Quantizer, Fp8Quantizer

_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names of the number of such layers in configurations."""
_LAYER = re.compile(r"(.*?)(?:layers|mtp)\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")
_FUSED = re.compile(r".*\.experts\.(gate_up_proj|up_proj|down_proj)$")
_OWN_FILE = "model-mtp.safetensors"
_FIRST = "model-00001-of-00001.safetensors"
"""The name of a single file of weights once there is another one beside it."""

Heads = Sequence[FoundTensor]
"""The tensors of such layers, with the names and shapes that they have in floats."""


@dataclass(frozen=True)
class Further:
    """What a pruned checkpoint has of such layers."""

    heads: Heads
    """The tensors that are written."""
    said: dict[str, str]
    """What manifest and card say of them."""
    kept: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The kept atoms (E, I) of each layer that is pruned, by its first number."""


def predicting_heads(skeleton: Any, base: str) -> Heads:
    """The layers of a model's files; none if they are not on this machine.

    Args:
        skeleton: the unpruned model, which may be on the meta device.
        base: its folder or hub id.

    Raises:
        LayoutError: a scale is missing, or scales are of other blocks.
    """
    folder = Path(base)
    if base and not folder.is_dir():
        cached = [try_to_load_from_cache(base, name) for name in (SINGLE, INDEX)]
        paths = [Path(path) for path in cached if isinstance(path, str)]
        folder = paths[0].parent if paths else folder
    try:
        stored, quantizer = read_headers(folder), quantizer_in(folder)
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

    conversions = conversions_of(skeleton)
    is_ours = isinstance(quantizer, Fp4Quantizer | Fp8Quantizer)
    if is_ours:
        conversions = quantizer.update_weight_conversions(conversions, skeleton)
    every = find_tensors(skeleton, conversions, stored)
    heads = [entry for entry in every if is_one(entry.parameter)]
    return in_floats(heads, quantizer) if is_ours else heads


def check_experts(heads: Heads) -> None:
    """Check that such layers have each matrix of every expert.

    Raises:
        LayoutError: one is missing.
    """
    experts: dict[tuple[str, str], set[str]] = {}
    for place in filter(None, (_EXPERT.match(head.name) for head in heads)):
        experts.setdefault((place[1], place[3]), set()).add(place[2])
    every = set().union(*experts.values())
    for (stem, matrix), numbers in experts.items():
        if numbers != every:
            raise LayoutError(
                f"{stem}*.{matrix}, in a layer that predicts further tokens, is there "
                f"of {len(numbers)} experts, expected {len(every)}: the files are "
                "incomplete, download them again"
            )


def are_readable(heads: Heads) -> bool:
    """Whether they are in floating point, or in a format that is dequantised."""
    return all(head.packed or head.dtype in FLOATS for head in heads)


def floats_of(heads: Heads) -> dict[str, torch.Tensor]:
    """Their tensors; those that are quantised are dequantised to bfloat16."""
    quantizer, tensors = quantizer_in(heads[0].file.parent), {}
    for head in heads:
        parts = [read_tensor(part) for part in head.packed or (head,)]
        tensors[head.name] = quantizer.weight_of(*parts) if head.packed else parts[0]
    return tensors


def has_experts(heads: Heads) -> bool:
    """Whether a routed expert is in them."""
    return any(".experts." in head.name for head in heads)


def check_sliceable(heads: Heads) -> None:
    """Check that a tensor is a matrix of one expert, or of all as transformers has it.

    Raises:
        ValueError: one is another.
    """
    for head in heads:
        fused = _FUSED.match(head.name) and not head.converter
        if ".experts." in head.name and not (fused or _EXPERT.match(head.name)):
            raise ValueError(f"{head.name} is no matrix of one expert, or of all")


def by_layer(heads: Heads, n_blocks: int = 1) -> dict[int, Heads]:
    """The tensors of each layer, by its number in names; those without one in each.

    With `n_blocks` above 1 a layer has so many numbers; it is known by the first.
    """
    places = [(head, _LAYER.match(head.name)) for head in heads]
    numbers = {int(place[2]) for _, place in places if place} or {0}
    return {
        start: [
            head
            for head, place in places
            if not place or start <= int(place[2]) < start + n_blocks
        ]
        for start in sorted(numbers)[::n_blocks]
    }


def check_number(heads: Heads, n_layers: int, config: Any) -> None:
    """Check that there are as many layers as a configuration says, or more.

    Raises:
        LayoutError: some are missing.
    """
    settings = config.get_text_config()
    expected = max(getattr(settings, name, None) or 0 for name in _COUNTS)
    if n_layers < expected:
        raise LayoutError(
            f"{heads[0].file.parent} has {n_layers} of {expected} layers that predict "
            "further tokens: download it again, or set their number in config.json"
        )


def stem_of(heads: Heads) -> str:
    """The beginning of the names of a layer, such as `mtp.layers.0.`."""
    places = filter(None, (_LAYER.match(head.name) for head in heads))
    return next((place[0] for place in places), heads[0].name)


def said_of(heads: Heads, verb: str, how: str = "") -> dict[str, str]:
    """What manifest and card say of such layers; nothing if there are none."""
    names = sorted(head.name for head in heads)
    if not names:
        return {}
    text = f"{len(names)} tensors of layers that predict further tokens (MTP), from "
    return {verb: f"{text}{names[0]} to {names[-1]}{how}"}


def without_predicting(config: Any) -> None:
    """Let a configuration, and a wrapper's inner one, say that there are none."""
    for settings in (config, config.get_text_config()):
        for name in _COUNTS:
            if getattr(settings, name, None):
                setattr(settings, name, 0)


def add_heads(
    folder: Path, further: Further, model: Any, packing: Fp8Files | None
) -> dict[str, str]:
    """Write such layers to the checkpoint in `folder`.

    Args:
        folder: the checkpoint, complete but for them.
        further: the layers.
        model: the model in `folder`, whose shared experts may be wider than before.
        packing: how its weights are quantised, if they are.

    Returns:
        The SHA-256 of the file that they are in; the weights beside it are
        unchanged, but for the name of a single file.
    """
    tensors = floats_of(further.heads)
    if further.kept:
        tensors = _narrow(tensors, further, model)
    if packing is not None:
        tensors = packing.written(tensors)
    save_file(tensors, folder / _OWN_FILE, metadata={"format": "pt"})
    if (folder / SINGLE).is_file():
        (folder / SINGLE).rename(folder / _FIRST)
    write_index(folder)
    return {_OWN_FILE: files.checksum(folder / _OWN_FILE)}


def _narrow(
    tensors: Mapping[str, torch.Tensor], further: Further, model: Any
) -> dict[str, torch.Tensor]:
    """The tensors of pruned layers, with shared experts as wide as those of `model`."""
    shared = {
        _LAYER.sub("", name, 1): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if "shared_expert" in name
    }
    experts, narrow = find_experts(model)[-1], {}
    for head in further.heads:
        tensor = _sliced(head, tensors[head.name], further.kept, experts)
        narrow[head.name] = fit(_LAYER.sub("", head.name, 1), tensor, shared)
    return narrow


def _sliced(
    head: FoundTensor,
    tensor: torch.Tensor,
    keeps: Mapping[int, torch.Tensor],
    experts: ExpertsLayer,
) -> torch.Tensor:
    """A tensor of a pruned layer, whose family has its experts as `experts`."""
    layer, one = _LAYER.match(head.name), _EXPERT.match(head.name)
    if layer is None or ".experts." not in head.name:
        return tensor
    kept = keeps[max(first for first in keeps if first <= int(layer[2]))]
    is_down = head.parameter.endswith("down_proj")
    if one is None:
        return narrowed(tensor, kept, experts, is_down=is_down)
    return tensor.index_select(int(is_down), kept[int(one[2])].nonzero()[:, 0])


def narrowed(
    tensor: torch.Tensor, kept: torch.Tensor, experts: ExpertsLayer, *, is_down: bool
) -> torch.Tensor:
    """The kept atoms (E, I) of a matrix of all experts, in the orientation it has."""
    matrices, rows = experts.oriented(tensor), kept
    if is_down:
        matrices = matrices.mT
    else:
        rows = kept.new_empty(matrices.shape[:2])
        experts.by_atom(rows).copy_(kept[..., None])
    narrow = matrices[rows].unflatten(0, (len(kept), -1))
    return experts.oriented(narrow.mT if is_down else narrow).contiguous()
