"""Batches as large as the memory of a model's device allows."""

import gc
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from heapr_lab.errors import HeaprLabError
from heapr_lab.models.likelihood import input_device

logger = logging.getLogger(__name__)

T = TypeVar("T")


def starting_batch_size(
    model: nn.Module, n_windows: int, seq_len: int, *, tokens: dict[str, int]
) -> int:
    """Windows of a first batch: as many as have `tokens` of the model's device.

    Args:
        model: a causal language model of transformers.
        n_windows: as many at most.
        seq_len: tokens of a window.
        tokens: of a batch, by type of device; `cpu` serves for any other.
    """
    room = tokens.get(input_device(model).type, tokens["cpu"])
    return max(1, min(n_windows, room // seq_len))


def halving_batches(run: Callable[[int], T], batch_size: int, *, model: nn.Module) -> T:
    """`run(batch_size)`, with half the size each time that memory runs out.

    Args:
        run: called with a number of windows; it begins anew, or goes on where it was.
        batch_size: the first to try.
        model: what `run` runs; the cache of its device is emptied between two tries.

    Raises:
        HeaprLabError: memory does not suffice for a single window.
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
        # Not in the handler: the error's traceback holds the tensors of the failed try.
        _empty_cache(device)
        batch_size //= 2
        logger.warning("out of memory on %s: batch size now %d", device, batch_size)


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error` says that a device, or the machine, has no memory left."""
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or should_reduce_batch_size(error)  # of MPS and others, and of a CPU on Linux
        or "DefaultCPUAllocator: not enough memory" in str(error)  # on Windows
    )


def _empty_cache(device: torch.device) -> None:
    """Give back what the failed try has left, where the device keeps it for later."""
    gc.collect()
    module: Any = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
