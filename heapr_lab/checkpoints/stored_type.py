"""How weights are written: in the type of the files that they came from.

Those that were in blocks of FP8 may stay so, in a stock checkpoint: what is unchanged
is copied to the bit; sliced weights are quantised again, each block with a scale of its
own.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from heapr_lab.models.backend import FileTypes, backend_of
from heapr_lab.models.experts import is_wrapper, sliced_experts
from heapr_lab.models.folders import read_config, skeleton_of, unquantised
from heapr_lab.models.formats import blocks_fit
from heapr_lab.models.safetensors_headers import (
    INDEX,
    Stored,
    StoredTensor,
    read_header,
    read_headers,
)
from heapr_lab.models.sources import source_of
from heapr_lab.storage import files
from heapr_lab.streaming.file_reader import FLOATS, find_tensors
from heapr_lab.streaming.on_disk import write_index
from heapr_lab.streaming.quantisation import SCALES, dequantised, quantised

_PACKED = ("up_rows", "down_columns")
"""Names of matrices of experts in memory; the second has columns as rows."""
_AT_ONCE = 16
"""Rows of blocks that are rounded together, as that takes several times their bytes."""
_SCALES = {"F32", "BF16"}
"""Types that scales may have, by their names in files."""


def file_types(model: Any, dtype: torch.dtype | None = None) -> FileTypes:
    """How a model of `prune` is written: in `dtype`, or as the files of the dense one.

    Only the latter may be quantised.
    """
    packing = packing_of(model) if dtype is None else None
    return FileTypes(dtype or stored_dtype(model), float32_in_files(model), packing)


def stored_dtype(model: Any) -> torch.dtype:
    """The type of a model's files, if they are known; else that of its weights.

    Dequantised weights are written in bfloat16.
    """
    source = source_of(model)
    if source is not None and source.dequantised_from is not None:
        return torch.bfloat16
    dtype: torch.dtype = (source and source.dtype) or model.dtype
    return dtype


def float32_in_files(model: Any) -> frozenset[str]:
    """Names of what files in 16 bits have in float32, such as routers, but no experts.

    There are none if the files of the dense model are not on this machine.
    """
    source = source_of(model)
    if source is None or source.dtype is None or source.dtype.itemsize != 2:
        return frozenset()
    stored = read_headers(source.folder)
    dense = dense_skeleton(model)
    tensors = find_tensors(dense, conversions_of(dense), stored)
    wide = {entry.parameter for entry in tensors if entry.dtype == "F32"}
    return frozenset(name for name in wide if ".experts." not in name)


def conversions_of(model: Any) -> list[Any]:
    """What transformers makes of tensors, those beside a wrapper's inner model too."""
    inside = [model.get_decoder()] if is_wrapper(model.config) else []
    return [c for part in (model, *inside) for c in get_model_conversion_mapping(part)]


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """A tensor as it is in its file."""
    with safe_open(stored.file, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(stored.name)
    return tensor


def cast(model: Any, types: FileTypes) -> Any:
    """The model to write in these types: itself, or a copy that has them."""
    if backend_of(model).casts(types) or model.dtype == types.dtype:
        return model
    memo: dict[int, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        stays = not tensor.is_floating_point() or types.stays(model, name)
        new = tensor if stays else tensor.detach().to(types.dtype)
        if isinstance(tensor, nn.Parameter) and not stays:
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = new
    return copy.deepcopy(model, memo)


@torch.no_grad()
def round_changed(model: Any, types: FileTypes) -> None:
    """Round what is not as in the dense model's files as it will be written.

    These are the experts of a pruned model, and what `heal` trained. Layers on disk are
    rounded when they are read.
    """
    if backend_of(model).casts(types):
        return
    experts = tuple(f"{name}." for name in sliced_experts(model))
    trained = model.__dict__.get("heapr_trained", ())
    for name, tensor in model.named_parameters():
        is_expert = name.startswith(experts) and tensor.is_floating_point()
        if is_expert or (name in trained and not types.stays(model, name)):
            tensor.copy_(types.rounded(name.rpartition(".")[2], tensor))


# --- FP8 --------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8Files:
    """The files of a dense model in FP8, and how a pruned one is written like them."""

    settings: Mapping[str, Any]
    """`quantization_config` in config.json."""
    stored: Stored
    """The tensors of the dense model."""
    scales: torch.dtype
    """Type of the scales."""
    computes: torch.dtype
    """Type that the model runs in."""

    def rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the experts in memory, by its name, as it is read from files."""
        if name not in _PACKED:
            return tensor
        block = self._block if name == _PACKED[0] else self._block[::-1]
        pieces = []
        for rows in tensor.detach().split(_AT_ONCE * block[0]):
            codes = quantised(rows, block, self.scales, powers=self._powers)
            pieces.append(dequantised(*codes, block).to(self.computes))
        return torch.cat(pieces)

    def written(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors as they are written, by their names in files.

        Those of the dense model's files that are in FP8 are again, with their scales:
        the same if they have the same values, else new ones.
        """
        packed = {}
        for name, tensor in tensors.items():
            if f"{name}{SCALES}" in self.stored:
                packed[name], packed[f"{name}{SCALES}"] = self._in_blocks(name, tensor)
            else:
                packed[name] = tensor
        return packed

    def settle(self, folder: Path) -> None:
        """Let weights in floats be in FP8, and config.json say so."""
        for path in sorted(folder.glob("*.safetensors")):
            header = read_header(path)
            if any(f"{name}{SCALES}" in self.stored.keys() - header for name in header):
                tensors = self.written(load_file(path))
                with files.replacing(path) as temporary:
                    save_file(tensors, temporary, metadata={"format": "pt"})
        if (folder / INDEX).exists():
            write_index(folder)
        config = files.read_object(folder / "config.json")
        added = {"quantization_config": dict(self.settings)}
        files.write_json(folder / "config.json", config | added)

    @property
    def _block(self) -> tuple[int, int]:
        rows, columns = self.settings["weight_block_size"]
        return rows, columns

    @property
    def _powers(self) -> bool:
        return self.settings.get("scale_fmt") == "ue8m0"

    def _in_blocks(
        self, name: str, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = read_tensor(self.stored[name])
        scales = read_tensor(self.stored[f"{name}{SCALES}"])
        if numbers.shape == tensor.shape:
            before = dequantised(numbers, scales, self._block).to(self.computes)
            if torch.equal(before.to(tensor.dtype), tensor.cpu()):
                return numbers, scales
        return quantised(tensor, self._block, self.scales, powers=self._powers)


def packing_of(model: Any) -> Fp8Files | None:
    """How a model of `prune` is written in FP8; None if it is written in floats.

    It is in FP8 if the files of its dense model are, in blocks that its one width is a
    multiple of, and have the names that are written.
    """
    source = source_of(model)
    if source is None or not blocks_fit(source.block, model.heapr_keep.one_width):
        return None
    dense = dense_skeleton(model)
    stored = read_headers(source.folder)
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    names = set(revert_weight_conversion(dense, dense.state_dict()))
    eight = {name for name in names if kinds.get(name, "").startswith("F8_")}
    scales = {kinds.get(f"{name}{SCALES}", "") for name in eight}
    same = names - set(dense.all_tied_weights_keys) <= stored.keys()
    if not same or len(scales) != 1 or not scales <= _SCALES:
        return None
    settings = read_config(source.folder).quantization_config
    return Fp8Files(settings, stored, FLOATS[scales.pop()], model.dtype)


def dense_skeleton(model: Any) -> Any:
    """The model that a pruned one was made of, without weights."""
    return skeleton_of(unquantised(model.config))
