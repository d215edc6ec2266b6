"""The backend of models whose weights stay on disk.

Those of a pruned one are sliced from the dense one when they are read, and written to
files a part at a time.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from heapr_lab.errors import SpecError
from heapr_lab.models.backend import (
    Backend,
    Change,
    FileTypes,
    Gradient,
    GradientPass,
    NewModule,
    States,
    Tensors,
    Training,
    TrainingPlan,
    put,
    register,
)
from heapr_lab.models.folders import build, unquantised
from heapr_lab.models.ragged_experts import carry_code
from heapr_lab.models.safetensors_headers import INDEX, SINGLE, Stored, read_header
from heapr_lab.models.weights_hash import block_sums
from heapr_lab.progress import Progress
from heapr_lab.storage import files
from heapr_lab.streaming.layerwise import LayerByLayer
from heapr_lab.streaming.stream import OUTSIDE, Stream, part_of, put_tensor, stream_of
from heapr_lab.streaming.sweep_store import budget_of, temporary
from heapr_lab.streaming.training import StreamedTraining
from heapr_lab.streaming.two_sweeps import streamed_pass, token_bytes, weight_gradients

_WRITTEN = ".partial-written.json"
"""In an unfinished folder: the SHA-256 of each finished shard."""


class OnDisk(Backend):
    """Runs a model a layer at a time, on as many windows as there is room for."""

    place = "streamed from disk"
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

    def weight(self, module: Any, name: str) -> Any:
        """The parameter, whose decoder layer is read now, and the one before dropped.

        The next layer that is read takes it from the module, not from the caller.
        """
        with self.stream.holding(part_of(module)):
            return getattr(module, name)

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
        share: float,
    ) -> Iterator[torch.Tensor]:
        """The final states on the CPU, by sweeps that read each layer once.

        As many batches go through one together as there is room for, but at least one.
        """
        start, room = 0, share * self.at_once(model, 0)
        while start < len(batches):
            sizes = itertools.accumulate(ids.numel() for ids in batches[start:])
            group = batches[start : start + max(1, sum(n <= room for n in sizes))]
            walk = LayerByLayer(model, group)
            for number in range(walk.n_layers):
                walk.run(number)
            for ids, states in zip(group, walk.states, strict=True):
                yield walk.finished(ids, states).cpu()
            start += len(group)

    def backward(self, model: nn.Module, run: GradientPass) -> None:
        """Run all windows by two sweeps over the layers."""
        streamed_pass(model, self.stream, run)

    def weight_gradients(
        self,
        model: nn.Module,  # noqa: ARG002
        ids: torch.Tensor,
        batch_size: int,
        run: States,  # noqa: ARG002
        gradient: Gradient,
        trained: Any,
        progress: Progress,
    ) -> None:
        """Two sweeps, on the way back of which `trained` takes a layer's gradients."""
        store = temporary(budget_of(self.stream))
        store.begin("states")
        weight_gradients(
            self.stream, ids, batch_size, gradient, trained, store, progress
        )

    def training(self, plan: TrainingPlan) -> Training:
        """A training in which each part is changed when it is read."""
        return StreamedTraining(self.stream, plan)

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
        config = unquantised(model.config)  # weights are dequantised when read
        with torch.device("meta"):
            twin = build(config, dtype=model.dtype)
            for module in new:
                put(twin, module.name, module.empty(twin.get_submodule(module.name)))
        experts = {m.layer: (m.name, functools.partial(_tensors, m.made)) for m in new}
        if hasattr(model, "generation_config"):
            twin.generation_config = model.generation_config
        twin._weight_conversions = getattr(model, "_weight_conversions", None)
        sliced: nn.Module = self.given(twin, model, experts, _unchanged)
        return sliced

    def given(
        self,
        new: Any,
        model: nn.Module,  # noqa: ARG002
        experts: Mapping[int, tuple[str, Callable[[], Tensors]]],
        change: Change,
    ) -> Any:
        """`new`, which is streamed, and reads what `model` reads."""
        source = self.stream
        new.eval()
        reader = SlicedReader(new, source, experts, change)
        stream = Stream(new, reader, dtype=source.dtype, device=source.device)
        stream.host_memory, stream.types = source.host_memory, source.types
        return on_disk(stream)

    def sliced_from(self) -> str | None:
        """The state of the files."""
        return self.stream.reader.state

    def casts(self, types: FileTypes) -> bool:
        """Yes, from here on: experts and what was trained, and all when written."""
        self.stream.write_as(types)
        return True

    def write(
        self,
        model: Any,
        folder: Path,
        *,
        max_shard_size: str,  # noqa: ARG002
        progress: Progress,
    ) -> dict[str, str]:
        """Write what `model.save_pretrained(folder)` writes, holding a part in memory.

        A shard has the tensors of one part, with the names that the family's files
        have. They are in the types of `casts`, but for those of another type than the
        model's. Shards that an interrupted call of the same model finished are kept.
        """
        model.config.dtype = self.stream.types.dtype
        if getattr(model.config, "quantization_config", None) is not None:
            carry_code(folder, model.config, type(model).__name__)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        written = _finished(folder)
        n_parts = len(self.stream.parts)
        for done, number in enumerate(self.stream.parts, 1):
            path = folder / SINGLE.replace(".", f"-{done:05d}-of-{n_parts:05d}.", 1)
            if path.name not in written:
                tensors = _stored(model, self.stream, number)
                with files.replacing(path) as temporary:
                    save_file(tensors, temporary, metadata={"format": "pt"})
                del tensors
                written[path.name] = files.checksum(path)
                files.write_json(folder / _WRITTEN, written)
            progress(done, n_parts)
        write_index(folder)
        return written


def on_disk(stream: Stream) -> Any:
    """The model of `stream`, whose backend is on disk from here on."""
    register(stream.model, OnDisk(stream))
    return stream.model


def _unchanged(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _tensors(make: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    return dict(make().named_parameters(recurse=False))


# --- slices -----------------------------------------------------------------------


class SlicedReader:
    """Gives a model the weights of a streamed one, but for its experts'."""

    def __init__(
        self,
        model: nn.Module,
        source: Stream,
        experts: Mapping[int, tuple[str, Callable[[], Tensors]]],
        change: Change,
    ) -> None:
        """Nothing is read yet.

        Args:
            model: without weights.
            source: the stream of the dense model, whose modules have the same names.
            experts: by layer, the name of the module of its experts, and what makes
                its tensors from the dense ones while these are in memory.
            change: what the other tensors become, by their names.
        """
        self._model, self._source = model, source
        self._experts, self._change = experts, change

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
        with self._source.holding(None if number == OUTSIDE else number):
            for name, tensor in self._made(number, names).items():
                put_tensor(self._model, name, tensor)
            if number != OUTSIDE:
                self._source.drop()

    def _made(self, number: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The tensors of a part, of what the dense model has in memory."""
        dense = self._source.model.state_dict()
        tensors = {n: self._change(n, dense[n]) for n in dense.keys() & names}
        if number in self._experts:
            stem, make = self._experts[number]
            stream = stream_of(self._model)
            assert stream is not None
            tensors |= {f"{stem}.{n}": stream.rounded(n, t) for n, t in make().items()}
        return {name: tensors[name] for name in names}

    def prepare(self, names: Collection[str]) -> None:
        """The dense model reads its next part ahead by itself."""


# --- files ------------------------------------------------------------------------


def _finished(folder: Path) -> dict[str, str]:
    """The SHA-256 of each shard that is there and whole; others are removed."""
    noted = folder / _WRITTEN
    written = files.read_object(noted) if noted.exists() else {}
    for path in folder.glob("*.safetensors"):
        if written.get(path.name) != files.checksum(path):
            path.unlink()
    return {name: sha for name, sha in written.items() if (folder / name).exists()}


def write_index(folder: Path) -> None:
    """Write the index of the shards in a folder, whose headers are read."""
    stored: Stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= read_header(path)
    n_bytes = sum(tensor.n_bytes for tensor in stored.values())
    weight_map = {name: tensor.file.name for name, tensor in stored.items()}
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    files.write_json(folder / INDEX, index)


def _stored(model: Any, stream: Stream, number: int) -> dict[str, torch.Tensor]:
    """The tensors of a part as they are written; those of no part with the last."""
    tied = model.all_tied_weights_keys
    with stream.holding(number):
        state = model.state_dict()
    wanted = [name for name in stream.parts[number].names if name not in tied]
    if number == max(stream.parts):
        wanted += stream.outside
    types, cast = stream.types, {name: state[name] for name in wanted}
    for name, tensor in cast.items():
        if tensor.dtype == stream.dtype and not types.stays(model, name):
            cast[name] = tensor.to(types.dtype)
    tensors = revert_weight_conversion(model, cast)
    if types.packing is not None:
        tensors = types.packing.written(tensors)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
