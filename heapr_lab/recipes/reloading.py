"""A written checkpoint is loaded again, and must predict as the model in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from heapr_lab.errors import CacheError, HeaprLabError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.all_experts import ready
from heapr_lab.models.folders import read_weights
from heapr_lab.models.sources import source_of
from heapr_lab.streaming.opening import free_memory, open_stepping
from heapr_lab.streaming.sizes import gigabytes
from heapr_lab.streaming.stream import stream_of
from heapr_lab.text.calibration import CalibrationSet

N_WINDOWS = 4
"""Held-out windows on which both are compared."""
MOST_APART = {torch.float64: 5e-5, torch.float32: 5e-5}
"""Nats per token by which the losses may differ, because kernels round differently."""
_MOST_IN_HALF = 0.01
_SHARE = 0.8
"""The share of the free memory that a second copy of the model may take."""

Check = Callable[[Path], dict[str, str]]


def reload_check(
    pruned: Any, windows: CalibrationSet, *, like: Any, corpus: str
) -> Check:
    """A check of the folder that a pruned model is written to.

    It is made while the weights are those that are written: the loss is measured now.

    Args:
        pruned: the model in memory, with its experts rounded as in the files, or the
            dense one within `masking`.
        windows: held-out text; of its windows the first four are used.
        like: the dense model, in whose dtype and on whose devices files are loaded.
        corpus: its name, for the card.

    Returns:
        A function of the folder that returns the fact `reloaded`. It raises
        CacheError if the folder cannot be loaded, or its loss is another.
    """
    ids = windows.ids[:N_WINDOWS]
    expected = evaluate_perplexity(pruned, ids).nll

    def check(folder: Path) -> dict[str, str]:
        why = _too_large(pruned, like)
        if why is not None:
            return {"reloaded": f"not checked: {why}"}
        change = _loss_of(folder, like, ids) - expected
        most = _most_apart(like)
        if not abs(change) <= most:  # which NaN is not, either
            raise CacheError(
                f"the written checkpoint was loaded again, and its loss on {len(ids)} "
                f"windows of {corpus} is {expected + change:.6f} nats per token in "
                f"place of {expected:.6f}: nothing is kept; write it again"
            )
        return {"reloaded": f"Δ nll = {change:z.4f} on {len(ids)} windows of {corpus}"}

    return check


def load_like(folder: Path, model: Any) -> Any:
    """The model in `folder`, of the dtype of `model`, on its devices, streamed as it.

    Raises:
        SpecError: the files are damaged.
        LayoutError: the model cannot be streamed.
    """
    stream = stream_of(model)
    if stream is not None:
        return open_stepping(
            folder,
            dtype=stream.dtype,
            device=stream.device,
            host_memory=stream.host_memory,
        )
    spread = len(getattr(model, "hf_device_map", {})) > 1
    placement = "auto" if spread else None
    loaded = read_weights(folder, dtype=model.dtype, device_map=placement)
    return ready(loaded if spread else loaded.to(model.device))


def _most_apart(like: Any) -> float:
    source = source_of(like)
    if source is not None and source.dequantised_from is not None:
        return _MOST_IN_HALF  # weights outside the experts are rounded in the files
    return MOST_APART.get(like.dtype, _MOST_IN_HALF)


def _loss_of(folder: Path, like: Any, ids: torch.Tensor) -> float:
    try:
        return evaluate_perplexity(load_like(folder, like), ids).nll
    except HeaprLabError as error:
        raise CacheError(
            f"the checkpoint was written, and cannot be loaded again: {error}"
        ) from error


def _too_large(pruned: Any, like: Any) -> str | None:
    """Why a second copy does not fit beside `pruned`; None if it does."""
    if stream_of(pruned) is not None:
        return None
    needed = pruned.num_parameters() * like.dtype.itemsize
    free = free_memory(like.device.type)
    if needed <= _SHARE * free:
        return None
    return f"a second copy of {gigabytes(needed)} does not fit in {gigabytes(free)}"
