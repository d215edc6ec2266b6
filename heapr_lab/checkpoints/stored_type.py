"""The type that weights are written in: that of the files which they came from."""

import copy
from typing import Any

import torch
from torch import nn

from heapr_lab.models.dtypes import stays_float32
from heapr_lab.models.experts import sliced_experts
from heapr_lab.models.sources import source_of
from heapr_lab.streaming.stream import Packing, stream_of


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


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """A model in memory with its weights in `dtype`: itself, or a copy.

    Tensors that its family keeps in float32 stay as they are.
    """
    if model.dtype == dtype:
        return model
    memo: dict[int, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        stays = not tensor.is_floating_point() or stays_float32(model, name)
        new = tensor if stays else tensor.detach().to(dtype)
        if isinstance(tensor, nn.Parameter) and not stays:
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = new
    return copy.deepcopy(model, memo)


def round_experts(
    model: Any, dtype: torch.dtype, packing: Packing | None = None
) -> None:
    """Round the experts of a pruned model, which may have changed, as they are written.

    All its other weights are those of the dense model's files. Layers on disk are
    rounded when they are read.
    """
    stream = stream_of(model)
    if stream is not None:
        stream.stored, stream.packing = dtype, packing
        return
    for experts in sliced_experts(model).values():
        for name, tensor in experts._parameters.items():
            if tensor is not None and tensor.is_floating_point():
                weight = tensor.data.to(dtype)
                weight = weight if packing is None else packing.rounded(name, weight)
                tensor.data = weight.to(tensor.dtype)
