"""Open a checkpoint as a model whose decoder layers stay on disk."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import AutoHfQuantizer

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.backend import FileTypes
from heapr_lab.models.folders import (
    build,
    quantisation,
    read_config,
    read_generation,
    read_weights,
    refuse_format,
)
from heapr_lab.models.formats import DEQUANTISED
from heapr_lab.models.hooks import ready
from heapr_lab.models.modes import evaluating
from heapr_lab.models.ragged_experts import HeaprQuantizer
from heapr_lab.streaming.file_reader import FileReader
from heapr_lab.streaming.layerwise import LayerByLayer
from heapr_lab.streaming.on_disk import on_disk
from heapr_lab.streaming.plan import free_memory, gigabytes, size_of
from heapr_lab.streaming.quantisation import with_our_classes
from heapr_lab.streaming.stream import Stream, stream_of

_SHARE = 0.8
"""The share of the free memory that a second copy of a model may take."""


def open_stepping(
    folder: Path, *, dtype: Any, device: torch.device, host_memory: int | str | None
) -> Any:
    """As `open_streamed`, a model whose layers can be run one by one.

    Args:
        folder: with safetensors files.
        dtype: of the weights in memory; `auto` is the checkpoint's own.
        device: of the weights in memory.
        host_memory: bytes for the states of its layers, or a size such as "16GB"; by
            default half of what is free.

    Raises:
        SpecError: `host_memory` is no size, or as `open_streamed`.
        LayoutError: they cannot.
    """
    budget = None if host_memory is None else size_of(host_memory, least=0)
    model = open_streamed(folder, dtype=dtype, device=device)
    _refuse_family(model.config, type(model).__name__)
    stream = stream_of(model)
    assert stream is not None
    stream.host_memory = budget
    with evaluating(ready(model)):
        LayerByLayer(model, [torch.zeros(1, 2, dtype=torch.long)])
    return model


def load_like(folder: Path, model: Any) -> Any:
    """The model in `folder`, of the dtype of `model`, on its devices, streamed as it.

    Raises:
        SpecError: the files are damaged.
        LayoutError: the model cannot be streamed.
    """
    stream = stream_of(model)
    if stream is not None:
        memory, place = stream.host_memory, stream.device
        return open_stepping(
            folder, dtype=stream.dtype, device=place, host_memory=memory
        )
    spread = len(getattr(model, "hf_device_map", {})) > 1
    placement = "auto" if spread else None
    loaded = read_weights(folder, dtype=model.dtype, device_map=placement)
    return ready(loaded if spread else loaded.to(model.device))


def why_no_copy(pruned: Any, like: Any) -> str | None:
    """Why `load_like` has no room for `pruned` beside it; None if it has."""
    if stream_of(pruned) is not None:
        return None
    needed = pruned.num_parameters() * like.dtype.itemsize
    free = free_memory(like.device.type)
    if needed <= _SHARE * free:
        return None
    return f"a second copy of {gigabytes(needed)} does not fit in {gigabytes(free)}"


def _refuse_family(config: Any, name: str) -> None:
    """Check that the layers of a family can be read one at a time.

    Raises:
        LayoutError: they cannot; the message says why.
    """
    if getattr(config.get_text_config(), "hidden_size_per_layer_input", 0):
        raise LayoutError(
            f"{name} ({config.model_type}) cannot be streamed: it has a second table "
            "of embeddings, which every layer reads; load the model with stream=False"
        )


def open_streamed(folder: Path, *, dtype: Any, device: torch.device) -> Any:
    """The model in `folder`, whose decoder layers are read when they run.

    Args:
        folder: with safetensors files.
        dtype: of the weights in memory; `auto` is the checkpoint's own, None that of
            each tensor in the files.
        device: of the weights in memory.

    Raises:
        SpecError: the configuration or a file is damaged, or the weights are quantised
            in a format that is not dequantised.
        LayoutError: a tensor is missing, or there is no list of decoder layers.
    """
    config = read_config(folder)
    config_dtype, as_stored = getattr(config, "dtype", None), dtype is None
    if dtype in (None, "auto"):
        dtype = config_dtype or torch.float32
    with torch.device("meta"):
        model = build(config, dtype=dtype)  # tensors are read in the type of its own
        quantizer = _prepared(model, config, folder)
    model.eval()
    generation = read_generation(folder)
    if generation is not None:
        model.generation_config = generation
    conversions = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    dequantiser = None if isinstance(quantizer, HeaprQuantizer) else quantizer
    reader = FileReader(
        model, folder, conversions, quantizer=dequantiser, dtype=dtype, device=device
    )
    if as_stored:
        reader.keep_types()
        dtype = config_dtype or model.dtype
    stream = Stream(model, reader, dtype=dtype, device=device)
    if dequantiser is not None:
        stream.types = FileTypes(torch.bfloat16)
    if quantizer is not None:
        quantizer.postprocess_model(model)
    return on_disk(stream)


def quantizer_in(folder: Path) -> Any:
    """What dequantises the weights in `folder`; None if they are not quantised.

    Raises:
        SpecError: the configuration is damaged.
    """
    config = read_config(folder)
    if quantisation(config) not in DEQUANTISED:
        return None
    with _refusing(folder):
        return _quantizer(config)


def _prepared(model: Any, config: Any, folder: Path) -> Any:
    """What made `model` one for weights that are pruned or quantised, if they are.

    Raises:
        SpecError: they are in another format or of a later version, or `config` is
            damaged.
    """
    refuse_format(folder, config)
    if quantisation(config) is None:
        return None
    with _refusing(folder):
        quantizer = _quantizer(config)
        quantizer.validate_environment()
        quantizer.preprocess_model(model, dtype=model.dtype)
    return quantizer


@contextlib.contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """What transformers raises of settings of quantised weights, in one line.

    Raises:
        SpecError: it raised something.
    """
    try:
        yield
    except SpecError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise SpecError(f"{folder}: {error}") from error


def _quantizer(config: Any) -> Any:
    """The quantizer of weights that are pruned or quantised."""
    section = config.quantization_config
    settings = dict(section if isinstance(section, dict) else section.to_dict())
    if quantisation(config) in DEQUANTISED:
        settings = with_our_classes(settings | {"dequantize": True})
    return AutoHfQuantizer.from_config(settings, pre_quantized=True)
