"""Models whose decoder layers stay on disk, and are read one at a time when they run.

The model is built without weights. Everything but its decoder layers (embeddings, last
norm, head) is read at once; a decoder layer is read when it is called or asked for, and
the one before it is dropped. Tensors are read through transformers' own conversions, so
that a layer has the weights that `from_pretrained` would give it, or none.
"""

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from heapr_lab.errors import HeaprLabError, LayoutError, SpecError
from heapr_lab.models.folders import build, read_config
from heapr_lab.models.safetensors_headers import read_source
from heapr_lab.models.weights_on_disk import FoundTensor, check_whole, find_tensors

_STREAM = "heapr_stream"
_Instead = Callable[..., torch.Tensor]
_instead: ContextVar[_Instead | None] = ContextVar("instead", default=None)


class Stream:
    """The files of a model, and the one decoder layer of it that is in memory."""

    def __init__(
        self, model: Any, folder: Path, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Read everything but the decoder layers.

        Raises:
            LayoutError: a tensor is missing, or there is no list of decoder layers.
        """
        self.device, self.dtype = device, dtype
        self.blocks = decoder_layers(model)
        self.n_bytes_read = 0
        self._model = model
        stored, _ = read_source(folder)
        self._files = {path: _state(path) for path in stored}
        every = list(find_tensors(model, get_model_conversion_mapping(model), stored))
        check_whole(model, every, sliced=())
        names = {id(module): name for name, module in model.named_modules()}
        self._stems = stems = [f"{names[id(block)]}." for block in self.blocks]
        self._parts: list[list[FoundTensor]] = [[] for _ in stems]
        rest: list[FoundTensor] = []
        for found in every:
            owners = [n for n, s in enumerate(stems) if found.parameter.startswith(s)]
            (self._parts[owners[0]] if owners else rest).append(found)
        self._resident: int | None = None
        self._lock, self._held = threading.RLock(), 0
        self._read(rest)
        model.tie_weights()
        self._make_buffers()
        left = [n for n, p in model.named_parameters() if p.is_meta]
        left = [n for n in left if not n.startswith(tuple(stems))]
        if left:
            raise LayoutError(f"{folder}: {left[0]} was not read; this is a bug")
        for number, block in enumerate(self.blocks):
            block.register_forward_pre_hook(self._before(number))
            block.register_forward_hook(self._after, always_call=True)
            block.__dict__["forward"] = functools.partial(_forward, block, number)

    @property
    def files_state(self) -> str:
        """A digest of the sizes and times of the files."""
        return hashlib.sha256(repr(sorted(self._files.items())).encode()).hexdigest()

    def fill(self, number: int) -> None:
        """Have the weights of one decoder layer in memory, and of no other.

        Raises:
            HeaprLabError: the files changed since the model was opened.
            LayoutError: a weight was not read.
        """
        with self._lock:
            if self._resident == number:
                return
            if self._resident is not None:
                self._empty(self._resident)
            block = self.blocks[number]
            try:
                self._read(self._parts[number])
            except BaseException:
                self._empty(number)  # it may have a part of its weights
                raise
            left = [name for name, p in block.named_parameters() if p.is_meta]
            left += [name for name, b in block.named_buffers() if b.is_meta]
            if left:
                raise LayoutError(f"layer {number}: {left} were not read")
            self._resident = number

    def _empty(self, number: int) -> None:
        """Drop the weights of a decoder layer."""
        self._resident = None
        for module in self.blocks[number].modules():
            for name, own in module._parameters.items():
                if own is not None:
                    meta = nn.Parameter(own.detach().to("meta"), requires_grad=False)
                    module._parameters[name] = meta
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to("meta")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every stored tensor of the model by its name, a layer at a time."""
        for name, tensor in self._model.state_dict().items():
            if not name.startswith(tuple(self._stems)):
                yield name, tensor
        for number, stem in enumerate(self._stems):
            self.fill(number)
            for name, tensor in self.blocks[number].state_dict().items():
                yield stem + name, tensor

    def _before(self, number: int) -> Callable[..., None]:
        def fill(_block: nn.Module, _args: Any) -> None:
            if _instead.get() is None:
                # No other thread takes the weights away while the layer runs.
                self._lock.acquire()
                self._held += 1
                self.fill(number)

        return fill

    def _after(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        if self._held and self._lock._is_owned():  # type: ignore[attr-defined]
            self._held -= 1
            self._lock.release()

    def _read(self, tensors: list[FoundTensor]) -> None:
        for path in {found.file for found in tensors}:
            if _state(path) != self._files[path]:
                raise HeaprLabError(
                    f"{path} has changed since the model was opened, so its layers "
                    "would be of two models: load it again"
                )
        handles = {f.file: safe_open(f.file, framework="pt") for f in tensors}
        slices = {f.name: handles[f.file].get_slice(f.name) for f in tensors}
        settings = LoadStateDictConfig(
            weight_mapping=list[Any](get_model_conversion_mapping(self._model)),
            dtype=self.dtype,
            device_map={"": self.device},
        )
        with _without_bar():
            convert_and_load_state_dict_in_model(self._model, slices, settings)
        self._model.requires_grad_(False)
        self.n_bytes_read += sum(found.tensor.n_bytes for found in tensors)

    @torch.no_grad()
    def _make_buffers(self) -> None:
        """Buffers that no file has, such as frequencies, as transformers makes them."""
        for stem, module in self._model.named_modules():
            if f"{stem}.".startswith(tuple(self._stems)):
                continue
            empty = [
                n for n, b in module._buffers.items() if b is not None and b.is_meta
            ]
            for name in empty:
                made = torch.empty_like(module._buffers[name], device=self.device)
                module._buffers[name] = made
            if empty:
                self._model._init_weights(module)


@contextlib.contextmanager
def _without_bar() -> Iterator[None]:
    """No progress bar of transformers, which would show one for each layer."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def open_streamed(folder: Path, *, dtype: Any, device: torch.device) -> Any:
    """The model in `folder`, whose decoder layers are read when they run.

    Args:
        folder: with safetensors files.
        dtype: of the weights in memory; `auto` is the checkpoint's own.
        device: of the weights in memory.

    Raises:
        SpecError: the configuration or a file is damaged, or the weights are quantised
            or pruned.
        LayoutError: a tensor is missing, or there is no list of decoder layers.
    """
    config = read_config(folder)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        kind = dict(quantised).get("quant_method", "unknown")
        raise SpecError(
            f"{folder} has weights in the format {kind!r}, which cannot be streamed: "
            "load it with stream=False"
        )
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = build(config, dtype=dtype)  # tensors are read in the type of its own
    model.eval()
    stream = Stream(model, folder, dtype=dtype, device=device)
    for module in model.modules():
        module.__dict__[_STREAM] = stream
    for number, block in enumerate(stream.blocks):
        for module in block.modules():
            module.__dict__["heapr_block"] = number
    return model


@contextlib.contextmanager
def standing_in(instead: _Instead) -> Iterator[None]:
    """Decoder layers of streamed models are not run in this context, nor read.

    Args:
        instead: called with a layer's number, its states and its other arguments; gives
            its output.
    """
    token = _instead.set(instead)
    try:
        yield
    finally:
        _instead.reset(token)


def _forward(
    block: nn.Module, number: int, states: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """The forward of a decoder layer, or what stands in for it."""
    instead = _instead.get()
    if instead is None:
        return type(block).forward(block, states, *args, **options)
    return instead(number, states, *args, **options)


def stream_of(module: nn.Module) -> Stream | None:
    """What reads the layers of a streamed model, or of a module of it; else None."""
    found: Stream | None = module.__dict__.get(_STREAM)
    return found


def refuse_streamed(model: nn.Module, *, remedy: str) -> None:
    """Check that all weights are in memory.

    Args:
        model: the model.
        remedy: for the message: what to do in place of this.

    Raises:
        SpecError: the model is streamed.
    """
    if stream_of(model) is not None:
        raise SpecError(
            "the layers of this model are on disk, and only one of them is in memory: "
            f"{remedy}"
        )


def filled(module: Any) -> Any:
    """`module`, with its weights in memory if it is in a streamed decoder layer."""
    stream = stream_of(module)
    if stream is not None and "heapr_block" in module.__dict__:
        stream.fill(module.__dict__["heapr_block"])
    return module


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a model, in order.

    Raises:
        LayoutError: they are not in one list.
    """
    config = model.config.get_text_config()
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if not lists:
        raise LayoutError(
            f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder "
            "layers, so it cannot be streamed"
        )
    return list(lists[0])


def _state(path: Path) -> tuple[int, int]:
    now = path.stat()
    return now.st_size, now.st_mtime_ns
