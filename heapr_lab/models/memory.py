"""Whether a model fits in memory, and batches as large as its device allows."""

import dataclasses
import gc
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size
from accelerate.utils.modeling import convert_file_size_to_int
from torch import nn

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.models.folders import DEQUANTISED, quantisation
from heapr_lab.models.footprint import (
    IN_MEMORY,
    PROCESS,
    Sizes,
    Work,
    device_parts,
    weight_bytes,
)
from heapr_lab.models.likelihood import input_device

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHARE_OF_MEMORY = 0.8
"""Of what is free, for weights; activations need some, too."""


def why_streamed(config: Any, sizes: Sizes, work: Work, free: float) -> str | None:
    """Why a model is streamed where it is not said; None if it is loaded whole.

    It is where its weights are dequantised, where they exceed 80 % of the memory, and
    where its scores need more memory, even with batches of one window.

    Args:
        config: of the model.
        sizes: of the model.
        work: the windows, and the type of the weights in memory.
        free: bytes of the device, besides what the process has already.

    Returns:
        What is wrong with its numbers, and what is done in place of it.
    """
    method = quantisation(config)
    if method in DEQUANTISED:
        return (
            f"the weights are in {method}: they are dequantised when they are read "
            "from disk, one decoder layer at a time"
        )
    weights = weight_bytes(sizes, work, streamed=False)
    window = dataclasses.replace(work, batch_tokens=work.seq_len)
    needed = sum(device_parts(sizes, window, IN_MEMORY).values()) - PROCESS[work.kind]
    if max(weights / _SHARE_OF_MEMORY, needed) <= free:
        return None
    return (
        f"{gigabytes(free)} are free, of which the weights may take "
        f"{_SHARE_OF_MEMORY:.0%}: they need {gigabytes(weights)}, and the scores of a "
        f"window of {work.seq_len:,} tokens {gigabytes(needed)} in all, so decoder "
        "layers are read from disk, one at a time (stream=False loads them all)"
    )


def gigabytes(n_bytes: float) -> str:
    """A size as text.

    Example:
        >>> gigabytes(1.25e10), gigabytes(2e6)
        ('12.5 GB', '0.002 GB')
    """
    large = n_bytes / 1e9
    return f"{large:,.0f} GB" if large >= 100 else f"{large:.3g} GB"


def size_of(size: int | str, *, least: int = 1) -> int:
    """Bytes, from a number or a text with a unit.

    Raises:
        SpecError: it is neither, or less than `least`.

    Example:
        >>> size_of("24GB"), size_of("1 GiB")
        (24000000000, 1073741824)
    """
    try:
        found = int(convert_file_size_to_int(size))
    except (ValueError, TypeError, AttributeError, OverflowError):
        found = -1
    if found < least:
        raise SpecError(
            f"a size is {size!r}, expected bytes, or a number with a unit: 16GB, 512MiB"
        )
    return found


def starting_batch_size(
    model: nn.Module, n_windows: int, seq_len: int, *, tokens: dict[str, int]
) -> int:
    """Number of windows in a first batch of about `tokens` for the model's device.

    Args:
        model: a causal language model of transformers.
        n_windows: the largest result.
        seq_len: tokens in each window.
        tokens: tokens in a batch, by type of device; that of `cpu` is the default.
    """
    room = tokens.get(input_device(model).type, tokens["cpu"])
    return max(1, min(n_windows, room // seq_len))


def halving_batches(run: Callable[[int], T], batch_size: int, *, model: nn.Module) -> T:
    """`run(batch_size)`, with the batch size halved each time memory runs out.

    Args:
        run: called with a number of windows; it starts again, or resumes.
        batch_size: the first batch size.
        model: the model that `run` uses, whose device's cache is emptied in between.

    Raises:
        HeaprLabError: there is not enough memory for a single window.
    """
    device = input_device(model)
    while True:
        try:
            return run(batch_size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if batch_size == 1:
                raise HeaprLabError(
                    f"one window needs more memory than {device} has ({error}); take "
                    "shorter windows (seq_len), a smaller dtype, or another device"
                ) from error
        # Not in the handler: the traceback holds the tensors of the failed attempt.
        _empty_cache(device)
        batch_size //= 2
        logger.warning("out of memory on %s: batch size now %d", device, batch_size)


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error` means that a device, or the machine, is out of memory."""
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or should_reduce_batch_size(error)  # of MPS and others, and of a CPU on Linux
        or "DefaultCPUAllocator: not enough memory" in str(error)  # on Windows
    )


def _empty_cache(device: torch.device) -> None:
    """Free the memory of a failed attempt that the device's allocator still caches."""
    gc.collect()
    module: Any = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
