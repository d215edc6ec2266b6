"""Pruned models whose weights are sliced from a streamed model when they are read."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from heapr_lab.models.backend import Change, Tensors
from heapr_lab.streaming.stream import OUTSIDE, Stream, put_tensor, stream_of


def unchanged(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, whatever its name."""
    return tensor


class SlicedReader:
    """Gives a model the weights of a streamed one, but for its experts'."""

    def __init__(
        self,
        model: nn.Module,
        dense: nn.Module,
        experts: Mapping[int, tuple[str, Callable[[], Tensors]]],
        change: Change = unchanged,
    ) -> None:
        """Nothing is read yet.

        Args:
            model: without weights.
            dense: a streamed model with modules of the same names.
            experts: by layer, the name of the module of its experts, and what makes
                its tensors from those of `dense` while these are in memory.
            change: what the other tensors become, by their names.
        """
        self._model, self._dense, self._experts = model, dense, experts
        self._change = change

    @property
    def _source(self) -> Stream:
        stream = stream_of(self._dense)
        assert stream is not None
        return stream

    def _rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor, which may have been changed, rounded as it is written."""
        stream = stream_of(self._model)
        assert stream is not None
        if tensor.dtype != stream.dtype:
            return tensor
        rounded = tensor.to(stream.stored)
        if stream.packing is not None:
            rounded = stream.packing.rounded(name, rounded)
        return rounded.to(tensor.dtype)

    @property
    def n_bytes_read(self) -> int:
        """The bytes that the dense model has read."""
        return self._source.n_bytes_read

    @property
    def state(self) -> str:
        """The state of the dense model; what is sliced from it is fixed."""
        return self._source.reader.state

    def read(self, number: int, names: Collection[str]) -> None:
        """Give the model the tensors of a part, and drop those of the dense model."""
        if number != OUTSIDE:
            self._source.fill(number)
        dense = self._dense.state_dict()
        tensors = {n: self._change(n, dense[n]) for n in dense.keys() & names}
        if number in self._experts:
            stem, make = self._experts[number]
            tensors |= {f"{stem}.{n}": self._rounded(n, t) for n, t in make().items()}
        for name in names:
            put_tensor(self._model, name, tensors[name])
        if number != OUTSIDE:
            self._source.drop()

    def prepare(self, names: Collection[str]) -> None:
        """The dense model reads its next part ahead by itself."""


def stream_slices(
    model: Any,
    dense: Any,
    experts: Mapping[int, tuple[str, Callable[[], Tensors]]],
    change: Change = unchanged,
) -> Stream:
    """Have a model without weights read those of the streamed model `dense`, sliced.

    Arguments are those of `SlicedReader`.
    """
    source = stream_of(dense)
    assert source is not None
    model.eval()
    if hasattr(dense, "generation_config"):
        model.generation_config = dense.generation_config
    if source.dequantised_from is None:  # names in files are those of the dense model
        model._weight_conversions = getattr(dense, "_weight_conversions", None)
    reader = SlicedReader(model, dense, experts, change)
    stream = Stream(model, reader, dtype=source.dtype, device=source.device)
    stream.host_memory = source.host_memory
    stream.dequantised_from, stream.stored = source.dequantised_from, source.stored
    return stream
