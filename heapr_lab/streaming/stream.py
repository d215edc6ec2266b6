"""Models whose weights stay on disk, and are read one part at a time when they run.

The parts are the embeddings, each decoder layer and the head; what is outside of them
(the last norm, and the other towers of a multimodal wrapper) is read at once. A part is
read when it is called or asked for, and the one before it is dropped. While it runs, a
thread reads the next one's bytes, so that the operating system has them in its cache.
Tensors are read through transformers' own conversions, so that a part has the weights
that `from_pretrained` would give it, or none.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from heapr_lab.errors import LayoutError
from heapr_lab.models.backend import FileTypes, backend_of
from heapr_lab.models.experts import text_modules
from heapr_lab.models.hooks import setting
from heapr_lab.models.memory import return_freed

_PART = "heapr_part"
_EMBEDDINGS = -1
"""The number of the part before decoder layer 0."""
OUTSIDE = -2
"""The number of what is in no part."""
_Instead = Callable[..., torch.Tensor]
T = TypeVar("T")


_instead: ContextVar[tuple[_Instead | None, bool]] = ContextVar(
    "instead", default=(None, True)
)
"""What stands in for the decoder layers, if anything, and whether embeddings run."""


@dataclass(eq=False)
class Part:
    """Modules whose weights are read and dropped together."""

    modules: list[nn.Module]
    names: list[str]
    """The names of its tensors in the model's state dict."""


class Reader(Protocol):
    """Where the weights of a streamed model come from."""

    @property
    def n_bytes_read(self) -> int:
        """Bytes read from files so far."""

    @property
    def state(self) -> str:
        """A digest that changes with the weights."""

    def read(self, number: int, names: Collection[str]) -> None:
        """Give the model these tensors: those of one part, or of none (`OUTSIDE`)."""

    def prepare(self, names: Collection[str]) -> None:
        """Know that these are read next, most likely."""


class Stream:
    """The parts of a model, of which one is in memory."""

    def __init__(
        self, model: Any, reader: Reader, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Read what is in no part, and have each part read when it runs.

        Args:
            model: without weights; it is streamed from here on.
            reader: of its weights.
            dtype: of the weights in memory.
            device: of the weights in memory.

        Raises:
            LayoutError: a tensor is missing, or there is no list of decoder layers.
        """
        self.reader, self.device, self.dtype = reader, device, dtype
        self.blocks = decoder_layers(model)
        self.embeddings = model.get_input_embeddings()
        self.seconds_reading = 0.0
        self.host_memory: int | None = None
        """Bytes of layers' states that are in memory; a share of what is free."""
        self.fingerprint: str | None = None
        """The digest of all weights, once it has been computed."""
        self.types = FileTypes(dtype)
        """Those in which a checkpoint of this model is written."""
        self.model = model
        model.tie_weights()
        self.parts = _parts(model, self.blocks)
        """What is read and dropped together, by its number."""
        inside = {name for part in self.parts.values() for name in part.names}
        self.outside = [name for name in model.state_dict() if name not in inside]
        """The names of the tensors in no part."""
        self._resident: int | None = None
        self.lock = threading.RLock()
        """Held while a part runs, so that no other thread takes its weights away."""
        reader.read(OUTSIDE, self.outside)
        model.tie_weights()
        self._make_buffers()
        for number, part in self.parts.items():
            for module in part.modules:
                module.__dict__["forward"] = functools.partial(_forward, module, number)
                for inner in module.modules():
                    inner.__dict__[_PART] = number

    @property
    def n_bytes_read(self) -> int:
        """Bytes read from files so far."""
        return self.reader.n_bytes_read

    def fill(self, number: int) -> None:
        """Have the weights of one part in memory, and of no other.

        Args:
            number: of a decoder layer; the part before the first one has the
                embeddings, the part after the last one the head.

        Raises:
            HeaprLabError: the files changed since the model was opened.
            LayoutError: a weight was not read.
        """
        with self.lock:
            before = self._resident
            if before == number:
                return
            if before is not None:
                self.drop()
            part = self.parts[number]
            started = time.perf_counter()
            try:
                self.reader.read(number, part.names)
                _share(part.modules)
                self._check_read(part)
            except BaseException:
                self._empty(number)  # it may have a part of its weights
                raise
            self.seconds_reading += time.perf_counter() - started
            self._resident = number
            if before is not None:
                following = self.parts.get(number + (1 if number > before else -1))
                self.reader.prepare([] if following is None else following.names)

    def _check_read(self, part: Part) -> None:
        """Check that a part has its weights.

        Raises:
            LayoutError: one was not read.
        """
        left = [name for name in part.names if tensor_of(self.model, name).is_meta]
        if left:
            raise LayoutError(
                f"{', '.join(left)} cannot be read: the files have other shapes of it, "
                "or not all of its parts; download the checkpoint again"
            )

    @contextlib.contextmanager
    def holding(self, number: int | None) -> Iterator[None]:
        """The weights of a part are in memory here, and no other thread drops them.

        Args:
            number: as of `fill`; None reads nothing.
        """
        with self.lock:
            if number is not None:
                self.fill(number)
            yield

    def drop(self) -> None:
        """Have the weights of no part in memory."""
        if self._resident is not None:
            self._empty(self._resident)
            return_freed()

    def _empty(self, number: int) -> None:
        """Drop the weights of a part."""
        self._resident = None
        empty: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one
        for top in self.parts[number].modules:
            for module in top.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        meta = nn.Parameter(
                            parameter.detach().to("meta"), requires_grad=False
                        )
                        module._parameters[name] = empty.setdefault(parameter, meta)
                for name, buffer in module._buffers.items():
                    in_files = name not in module._non_persistent_buffers_set
                    if buffer is not None and top in self.blocks and in_files:
                        module._buffers[name] = buffer.to("meta")

    def write_as(self, types: FileTypes) -> None:
        """Have what was changed rounded, when it is read, as it will be written."""
        self.types = types
        self.drop()
        self.reader.read(OUTSIDE, self.outside)

    def rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that may have been changed, by its last name, as it is written."""
        same = tensor.dtype != self.dtype
        return tensor if same else self.types.rounded(name, tensor)

    def each(self, measure: Callable[[torch.Tensor], T]) -> Iterator[tuple[str, T]]:
        """Every stored tensor's name and what `measure` makes of it, a part at a time.

        A result that is the tensor itself, or a view of it, keeps it in memory.
        """
        for name in self.outside:
            yield name, measure(tensor_of(self.model, name))
        for number, part in self.parts.items():
            for name in part.names:
                with self.holding(number):
                    tensor = tensor_of(self.model, name)
                yield name, measure(tensor)

    @torch.no_grad()
    def _make_buffers(self) -> None:
        """Buffers that no file has, such as frequencies, as transformers makes them."""
        inside = {id(m) for block in self.blocks for m in block.modules()}
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            tensor._is_hf_initialized = not tensor.is_meta  # so that it is left as is
        for module in self.model.modules():
            names = set(module._buffers)
            if id(module) in inside:  # the others are in files
                names = module._non_persistent_buffers_set
            empty = [
                name
                for name in names
                if (buffer := module._buffers[name]) is not None and buffer.is_meta
            ]
            for name in empty:
                blank = torch.empty_like(module._buffers[name], device=self.device)
                module._buffers[name] = blank
            if empty:
                self.model._init_weights(module)


def _parts(model: Any, blocks: list[nn.Module]) -> dict[int, Part]:
    """The parts of a model by number, in the order in which they run."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = ends[1] is not None and ends[0].weight is ends[1].weight
    modules = [ends] if tied else [[ends[0]], *([] if ends[1] is None else [ends[1:]])]
    numbers = [_EMBEDDINGS, len(blocks)]
    groups = {n: list(group) for n, group in zip(numbers, modules, strict=False)}
    groups |= {n: [block] for n, block in enumerate(blocks)}
    stems = {id(module): name for name, module in model.named_modules()}
    return {
        n: Part(
            group, [f"{stems[id(m)]}.{name}" for m in group for name in m.state_dict()]
        )
        for n, group in sorted(groups.items())
    }


def tensor_of(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer of that name."""
    stem, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(stem), leaf)
    return tensor


def put_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Let `tensor`, without gradients, be the parameter or buffer of that name."""
    stem, _, leaf = name.rpartition(".")
    module = model.get_submodule(stem)
    if leaf in module._parameters:
        parameter = nn.Parameter(tensor.detach(), requires_grad=False)
        module._parameters[leaf] = parameter
    else:
        module._buffers[leaf] = tensor


def _share(modules: list[nn.Module]) -> None:
    """Give tied modules, of which files have one, the same weight."""
    if len(modules) > 1:
        read = next(m for m in modules if not m.weight.is_meta)
        for module in modules:
            module._parameters["weight"] = read._parameters["weight"]


def replace_layers(
    layer: _Instead, *, embeds: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Decoder layers of streamed models are not run in this context, nor read.

    Args:
        layer: called with a layer's number, its states and its other arguments; gives
            its output.
        embeds: whether the embeddings are read and run; else they give zeros.
    """
    return setting(_instead, (layer, embeds))


def _forward(
    module: Any, number: int, inputs: torch.Tensor, /, *args: Any, **options: Any
) -> Any:
    """The forward of a module of a part, which is read now, or what stands in for it.

    Where layers are not run, the head is not, either.
    """
    stream, (layer, embeds) = stream_of(module), _instead.get()
    assert stream is not None
    if layer is None or (embeds and module is stream.embeddings):
        with stream.holding(number):
            return type(module).forward(module, inputs, *args, **options)
    if module in stream.blocks:
        return layer(number, inputs, *args, **options)
    sizes = *inputs.shape, module.weight.shape[1]  # of the embeddings
    return torch.zeros(sizes, dtype=stream.dtype, device=stream.device)


def stream_of(module: nn.Module) -> Stream | None:
    """What reads the layers of a streamed model, or of a module of it; else None."""
    stream: Stream | None = getattr(backend_of(module), "stream", None)
    return stream


def part_of(module: nn.Module) -> int | None:
    """The number of the part that a module of a streamed model is in, if any."""
    number: int | None = module.__dict__.get(_PART)
    return number


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a model, in order.

    Raises:
        LayoutError: they are not in one list.
    """
    config = model.config.get_text_config()
    lists = [
        module
        for _, module in text_modules(model)
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if not lists:
        raise LayoutError(
            f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder "
            "layers, the number in its configuration: they cannot be run one by one"
        )
    return list(lists[0])
