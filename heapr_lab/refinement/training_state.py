"""What trainings have in common: the rate of a step, and their state in a file."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from heapr_lab.errors import CacheError
from heapr_lab.storage.files import replacing

_MOMENTS = ("exp_avg", "exp_avg_sq")


def share_of_rate(step: int, n_steps: int, warm: float) -> float:
    """The share of a rate: it rises over `warm` steps, and falls to 0 at the end."""
    return min(1.0, (step + 1) / warm) * (1 - step / n_steps)


def save_training(
    path: Path,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    others: Mapping[str, torch.Tensor],
    *,
    key: str = "",
) -> None:
    """Write the state after a step.

    Args:
        path: the file.
        trained: the parameters that are trained, by name.
        optimizer: an Adam that has taken a step.
        others: what else to go on with.
        key: hash of all that determines the training.
    """
    tensors = {f"other.{name}": tensor for name, tensor in others.items()}
    for name, weight in trained.items():
        tensors[f"weight.{name}"] = weight.detach()
        for part, value in optimizer.state[weight].items():
            tensors[f"{part}.{name}"] = value
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"key": key})


def restore_training(
    path: Path,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    key: str = "",
) -> dict[str, torch.Tensor]:
    """Give parameters and optimiser the state in a file; returns the others.

    Raises:
        CacheError: the file is of another training, or is damaged.
    """
    try:
        with safe_open(path, "pt") as stored:
            if (stored.metadata() or {}).get("key", "") != key:
                raise CacheError(
                    f"{path} is the state of another training (another model or other "
                    "text); delete it, or give another file"
                )
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CacheError(f"{path} is damaged ({error}): delete it") from error
    for name, weight in trained.items():
        weight.data.copy_(tensors[f"weight.{name}"])
        moments = {part: tensors[f"{part}.{name}"] for part in _MOMENTS}
        optimizer.state[weight] = {
            "step": tensors[f"step.{name}"],  # a counter, which Adam has on the CPU
            **{part: moment.to(weight.device) for part, moment in moments.items()},
        }
    begin = "other."
    return {
        name.removeprefix(begin): tensor
        for name, tensor in tensors.items()
        if name.startswith(begin)
    }
