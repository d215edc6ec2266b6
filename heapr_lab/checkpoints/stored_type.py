"""How weights are written: in the type of the files that they came from.

Those that were in blocks of FP8 may stay so, in a stock checkpoint: what is unchanged
is copied to the bit; sliced weights are quantised again, each block with a scale of its
own.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from heapr_lab.models.experts import is_wrapper, sliced_experts
from heapr_lab.models.folders import read_config, skeleton_of, unquantised
from heapr_lab.models.formats import blocks_fit, stays_float32
from heapr_lab.models.safetensors_headers import INDEX, Stored, read_headers
from heapr_lab.models.sources import source_of
from heapr_lab.storage import files
from heapr_lab.streaming.file_reader import FLOATS, find_tensors
from heapr_lab.streaming.on_disk import write_index
from heapr_lab.streaming.quantisation import SCALES, dequantised, quantised
from heapr_lab.streaming.stream import stream_of

_PACKED = ("up_rows", "down_columns")
"""Names of matrices of experts in memory; the second has columns as rows."""
_AT_ONCE = 16
"""Rows of blocks that are rounded together, as that takes several times their bytes."""
_SCALES = {"F32", "BF16"}
"""Types that scales may have, by their names in files."""


def stored_dtype(model: Any) -> torch.dtype:
    """The type of a model's files, if they are known; else that of its weights.

    Dequantised weights are written in the type that their stream says.
    """
    stream = stream_of(model)
    if stream is not None and stream.dequantised_from is not None:
        return stream.stored
    source = source_of(model)
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


def in_dtype(model: Any, dtype: torch.dtype, wide: Collection[str] = ()) -> Any:
    """A model in memory with its weights in `dtype`: itself, or a copy.

    Tensors that its family, or files with `wide` ones, have in float32 stay as they
    are.
    """
    if model.dtype == dtype:
        return model
    memo: dict[int, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        stays = not tensor.is_floating_point() or _stays(model, name, wide)
        new = tensor if stays else tensor.detach().to(dtype)
        if isinstance(tensor, nn.Parameter) and not stays:
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = new
    return copy.deepcopy(model, memo)


def _stays(model: Any, name: str, wide: Collection[str]) -> bool:
    return name in wide or stays_float32(model, name)


@torch.no_grad()
def round_changed(
    model: Any, dtype: torch.dtype, packing: "Fp8Files | None" = None
) -> None:
    """Round what is not as in the dense model's files as it will be written.

    These are the experts of a pruned model, and what `heal` trained. Layers on disk are
    rounded when they are read.
    """
    wide, stream = float32_in_files(model), stream_of(model)
    if stream is not None:
        stream.write_as(dtype, packing, wide)
        return
    experts = tuple(f"{name}." for name in sliced_experts(model))
    trained = model.__dict__.get("heapr_trained", ())
    for name, tensor in model.named_parameters():
        if name.startswith(experts) and tensor.is_floating_point():
            weight = tensor.to(dtype)
            if packing is not None:
                weight = packing.rounded(name.rpartition(".")[2], weight)
            tensor.copy_(weight)
        elif name in trained and not _stays(model, name, wide):
            tensor.copy_(tensor.to(dtype))


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

    def settle(self, folder: Path, *, floats: bool) -> None:
        """Let config.json say that weights are in FP8; make them so if `floats`."""
        for path in sorted(folder.glob("*.safetensors")) if floats else ():
            tensors = self.written(load_file(path))
            with files.replacing(path) as temporary:
                save_file(tensors, temporary, metadata={"format": "pt"})
        if floats and (folder / INDEX).exists():
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

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self.stored[name].file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def _in_blocks(
        self, name: str, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = self._read(name), self._read(f"{name}{SCALES}")
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
