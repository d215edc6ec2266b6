"""The backend of models whose weights stay on disk."""

import copy
import functools
import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.backend import (
    Change,
    GradientPass,
    NewModule,
    States,
    Tensors,
    put,
    register,
)
from heapr_lab.models.folders import build
from heapr_lab.models.weights_hash import block_sums
from heapr_lab.progress import Progress
from heapr_lab.streaming.layerwise import swept_states
from heapr_lab.streaming.shards import save_streamed
from heapr_lab.streaming.sliced_stream import stream_slices, unchanged
from heapr_lab.streaming.stream import Stream
from heapr_lab.streaming.streamed_pass import streamed_pass, token_bytes
from heapr_lab.streaming.sweep_store import budget_of


class OnDisk:
    """Runs a streamed model a layer at a time, on as many windows as there is room for.

    The protocol is `heapr_lab.models.backend.Backend`.
    """

    runs_whole = False

    def __init__(self, stream: Stream) -> None:
        """The backend of the model that `stream` reads."""
        self.stream = stream

    def __deepcopy__(self, _memo: dict[int, Any]) -> "OnDisk":
        """Itself: copies of a module without its weights are of the same stream."""
        return self

    def device(self, weight: torch.Tensor) -> torch.device:  # noqa: ARG002
        """The device of the stream."""
        return self.stream.device

    def dtype(self, weight: torch.Tensor) -> torch.dtype:  # noqa: ARG002
        """The type of the stream."""
        return self.stream.dtype

    def loaded(self, module: Any) -> Any:
        """`module`, whose decoder layer is read now, and the one before it dropped."""
        self.stream.fill_part_of(module)
        return module

    def require_loaded(self, *, remedy: str) -> None:
        """Refuse: the weights are never in memory together.

        Raises:
            SpecError: always.
        """
        raise SpecError(
            "the layers of this model are on disk, and only one of them is in memory: "
            f"{remedy}"
        )

    def state(self, model: nn.Module) -> str:  # noqa: ARG002
        """A digest of the sizes and times of the files."""
        return self.stream.reader.state

    def fingerprint(self, model: nn.Module) -> str:  # noqa: ARG002
        """The digest as in memory, by reading each layer once; it is remembered."""
        if self.stream.fingerprint is None:
            sha = hashlib.sha256()
            sums = self.stream.each(lambda t: (tuple(t.shape), block_sums(t)))
            for name, (shape, tensor_sums) in sorted(sums):
                sha.update(f"{name}{shape}".encode())
                sha.update(tensor_sums)
            self.stream.fingerprint = sha.hexdigest()
        return self.stream.fingerprint

    def at_once(self, model: Any, n: int) -> int:
        """Tokens whose states, between two layers and the last, fit in memory."""
        n_bytes = 2 * token_bytes(model, self.stream.dtype)
        return max(n, budget_of(self.stream) // n_bytes)

    def final_states(
        self,
        model: nn.Module,
        batches: Sequence[torch.Tensor],
        run: States,  # noqa: ARG002
    ) -> list[torch.Tensor]:
        """The final states, by one sweep over the layers."""
        return swept_states(model, batches)

    def backward(
        self, model: nn.Module, run: GradientPass
    ) -> Generator[tuple[int, slice]]:
        """Run all windows by two sweeps over the layers."""
        return streamed_pass(model, self.stream, run)

    def when_needed(
        self, read: Callable[[], torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        """`read` itself."""
        return read

    def copy(
        self,
        model: nn.Module,
        memo: dict[int, Any],  # noqa: ARG002
        new: Sequence[NewModule],
    ) -> nn.Module:
        """A streamed model, which makes the new modules of a layer when it is read.

        Raises:
            SpecError: there are no new modules.
        """
        if not new:
            self.require_loaded(remedy="load it with stream=False to copy it")
        return self.replaced(model, new)

    def replaced(self, model: Any, new: Sequence[NewModule]) -> nn.Module:
        """Another streamed model."""
        config = copy.deepcopy(model.config)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config  # weights are dequantised when read
        with torch.device("meta"):
            twin = build(config, dtype=model.dtype)
            for module in new:
                put(twin, module.name, module.empty(twin.get_submodule(module.name)))
        experts = {m.layer: (m.name, functools.partial(_tensors, m.made)) for m in new}
        sliced: nn.Module = self.given(twin, model, experts, unchanged)
        return sliced

    def given(
        self,
        new: Any,
        model: nn.Module,
        experts: Mapping[int, tuple[str, Callable[[], Tensors]]],
        change: Change,
    ) -> Any:
        """`new`, which is streamed, and reads what `model` reads."""
        return on_disk(stream_slices(new, model, experts, change))

    def write(
        self,
        model: Any,
        folder: Path,
        *,
        max_shard_size: str,  # noqa: ARG002
        progress: Progress,
    ) -> dict[str, str]:
        """Write a shard for each layer."""
        return save_streamed(model, folder, progress=progress)


def on_disk(stream: Stream) -> Any:
    """The model of `stream`, whose backend is on disk from here on."""
    register(stream.model, OnDisk(stream))
    return stream.model


def _tensors(make: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    return dict(make().named_parameters(recurse=False))
