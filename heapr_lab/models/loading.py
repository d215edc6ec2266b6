"""Load models and tokenizers from the hub, a folder, or by a name of their own."""

import logging
import textwrap
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers.utils.logging import disable_progress_bar

from heapr_lab import hub, registry
from heapr_lab.errors import SpecError, one_of, whole_number
from heapr_lab.models.folders import (
    read_config,
    read_tokenizer,
    read_weights,
    refuse_format,
)
from heapr_lab.models.formats import DTYPES, refuse_by_name
from heapr_lab.models.hooks import ready
from heapr_lab.models.memory import return_freed
from heapr_lab.models.named import folder_of, hub_id, what_is_expected
from heapr_lab.models.safetensors_headers import refuse_path
from heapr_lab.progress import silent

logger = logging.getLogger(__name__)

ON_DISK, WHY_ON_DISK = "models on disk", "why a model is streamed"
"""In the registry, what opens a model whose layers stay on disk, and says why."""


def load_model(
    name_or_path: str | Path,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    stream: bool | str = "auto",
    host_memory: int | str | None = None,
    seq_len: int = 2048,
) -> tuple[nn.Module, Any]:
    """A causal language model in eval mode, and its tokenizer.

    Args:
        name_or_path: a hub id, a local folder, `lab`, `smollm2`, `smolmoe`, or a name
            in `heapr_lab.models.named`. Remote code is never run.
        device: `cpu`, `cuda`, `cuda:1`, ...; `auto` spreads the model over all GPUs
            (accelerate's device map), or uses the CPU if there is none.
        dtype: `auto` is the checkpoint's own on a GPU and float32 on the CPU; else
            `float32`, `bfloat16`, ... or a torch dtype.
        stream: whether decoder layers stay on disk and are read one at a time when they
            run; `auto` does so where the scores of one window need more than 75 % of
            the free memory, and logs the numbers, and where weights are quantised in
            FP8, MXFP4 or NVFP4. It loads a pruned checkpoint.
        host_memory: memory for the states of a streamed model's layers, in bytes or as
            "16GB"; those beyond it go to files in the cache's folder. By default half
            of what is free. `compress` takes as much for its sums, and for its steps.
        seq_len: tokens of the windows that scores are measured on, for `auto`.

    Raises:
        SpecError: the device or the model is not available, the model's files are
            damaged or quantised in another format, there is no such dtype or size, or
            `stream` is none of these.
        LayoutError: the family is refused by name, or cannot be streamed.
    """
    one_of(stream, (True, False, "auto"), name="stream")
    check_device(device)
    length = whole_number(seq_len, name="seq_len", least=1)
    path = _resolve(name_or_path)
    on_gpu = torch.cuda.is_available() if device == "auto" else device != "cpu"
    chosen = _dtype(dtype, on_gpu=on_gpu)
    placement = "auto" if device == "auto" and on_gpu else None
    if silent():
        disable_progress_bar()
    config = read_config(path)  # first: it determines the tokenizer's class
    refuse_by_name(config)
    refuse_format(path, config)
    tokenizer = read_tokenizer(path)
    if stream == "auto":
        ask = registry.find(WHY_ON_DISK, default=None)
        why = ask and ask(path, config, dtype=chosen, device=device, n_tokens=length)
        if why is not None:
            logger.warning("%s", why)
        stream = why is not None
    if stream:
        default = "cuda" if on_gpu else "cpu"
        placed = torch.device(default if device == "auto" else device)
        open_on_disk = registry.find(ON_DISK)
        model = open_on_disk(
            model_folder(path), dtype=chosen, device=placed, host_memory=host_memory
        )
        return model, tokenizer
    model = read_weights(path, dtype=chosen, device_map=placement)
    if placement is None:
        model.to("cpu" if device == "auto" else device)
    return_freed()
    return ready(model), tokenizer


def check_device(device: str) -> None:
    """Check that tensors can be put on `device`, which may be `auto`.

    Raises:
        SpecError: they cannot.
    """
    if device == "auto":
        return
    try:
        there = torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = textwrap.shorten(str(error), width=80, placeholder=" …")
        raise SpecError(
            f"device is {device!r}, which cannot be used here ({why}): give one of "
            f"{_devices_here()}"
        ) from error
    if there.is_meta:
        raise SpecError(
            f"device is {device!r}, which stores no values: give one of "
            f"{_devices_here()}"
        )


def _devices_here() -> str:
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ", ".join(["auto", "cpu", *gpus])


def model_folder(name_or_path: str | Path, *, only: str | None = None) -> Path:
    """The local folder of a model's files, which are downloaded first for a hub id.

    Args:
        name_or_path: as `load_model`.
        only: the one file to download, if not all.

    Raises:
        SpecError: there is no such model, or its configuration is damaged.
    """
    path = Path(_resolve(name_or_path))
    if path.is_dir():
        read_config(path)
        return path
    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md"]
    try:
        return Path(snapshot_download(str(path), allow_patterns=only or patterns))
    except (OSError, ValueError) as error:
        raise SpecError(
            f"cannot get the files of the model {str(name_or_path)!r}: {error}\n"
            f"Expected {what_is_expected()}"
        ) from error


def _resolve(name_or_path: str | Path) -> str:
    """The folder of a model, or its hub id."""
    name = str(name_or_path)
    named = folder_of(name)
    if named is not None:
        return str(named)
    if not Path(name).is_dir():
        refuse_path(name)
        hub.is_reachable()  # if it does not, only local files are used
    return hub_id(name)


def _dtype(dtype: str | torch.dtype, *, on_gpu: bool) -> str | torch.dtype:
    if dtype == "auto":
        return "auto" if on_gpu else torch.float32
    name = str(dtype).removeprefix("torch.")
    one_of(name, DTYPES, name="dtype")
    kind: torch.dtype = getattr(torch, name)
    return kind
