"""Batches as large as the device of a model allows, and memory that is free again."""

import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from heapr_lab.errors import HeaprLabError, whole_number
from heapr_lab.models.likelihood import input_device

logger = logging.getLogger(__name__)

_ON_CUDA = 32768


def tokens_at_first(model: nn.Module, *, on_cpu: int) -> int:
    """Tokens in a first batch: `on_cpu` unless the model is on a GPU with CUDA."""
    return _ON_CUDA if input_device(model).type == "cuda" else on_cpu


def in_batches(
    run: Callable[[int], None],
    model: nn.Module,
    windows: torch.Tensor,
    batch_size: int | None,
    *,
    on_cpu: int = 2048,
) -> None:
    """`run` with a batch size; by default one that the model's device has memory for.

    Args:
        run: called with a number of windows; it starts again, or resumes.
        model: a causal language model of transformers.
        windows: token ids, (n_windows, seq_len).
        batch_size: the number of windows, if it is given.
        on_cpu: as of `tokens_at_first`.

    Raises:
        SpecError: the batch size is not positive.
        HeaprLabError: there is not enough memory for a single window.
    """
    if batch_size is not None:
        run(whole_number(batch_size, name="batch_size"))
        return
    n_windows, seq_len = windows.shape
    room = tokens_at_first(model, on_cpu=on_cpu)
    halving_batches(run, max(1, min(n_windows, room // seq_len)), model=model)


def halving_batches(
    run: Callable[[int], None], batch_size: int, *, model: nn.Module
) -> None:
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
            run(batch_size)
            return
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


def return_freed() -> None:
    """Give freed memory back to the system; glibc keeps it in its heaps otherwise."""
    with contextlib.suppress(AttributeError, TypeError):  # of another libc
        ctypes.CDLL(None).malloc_trim(0)
