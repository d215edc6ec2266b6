"""The files a model was loaded from: their folder, size, and type of weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heapr_lab.models.dtypes import DEQUANTISED, FP8, block_of, blocks_fit
from heapr_lab.models.folders import quantisation, read_config
from heapr_lab.models.named import local_folder


@dataclass(frozen=True)
class Source:
    """A checkpoint on this machine."""

    folder: Path
    n_bytes: int
    """Size of its safetensors files."""
    dtype: torch.dtype | None
    """Type of its weights in its configuration; None if that does not say."""
    dequantised_from: str | None = None
    """The format of weights that are dequantised when they are read."""
    block: tuple[int, int] | None = None
    """Rows and columns of the blocks of weights in FP8, if they are in blocks."""

    def bytes_per_parameter(self, n_parameters: int) -> float:
        """Its size over the number of parameters of the model that it holds."""
        return self.n_bytes / n_parameters

    def bytes_per_kept(self, n_parameters: int, width: int | None) -> float:
        """The same for what is written when it is pruned to a width, if it is one.

        Dequantised weights are written in bfloat16, if not in FP8.
        """
        if self.is_dequantised(width):
            return torch.bfloat16.itemsize
        return self.bytes_per_parameter(n_parameters)

    def is_dequantised(self, width: int | None) -> bool:
        """Whether what is written is in floats, and was quantised."""
        return self.dequantised_from is not None and not blocks_fit(self.block, width)

    @property
    def dtype_name(self) -> str:
        """The type without its prefix, such as bfloat16."""
        return "unknown type" if self.dtype is None else dtype_name(self.dtype)


def read_source(folder: Path) -> Source:
    """The checkpoint in `folder`.

    Raises:
        SpecError: its configuration is damaged.
    """
    config = read_config(folder)
    method = quantisation(config)
    return Source(
        folder,
        weights_bytes(folder),
        config.dtype,
        method if method in DEQUANTISED else None,
        block_of(config.quantization_config) if method == FP8 else None,
    )


def source_of(model: Any) -> Source | None:
    """The files that `model` was loaded from; None if they are not on this machine."""
    name = str(getattr(model.config, "_name_or_path", ""))
    folder = local_folder(name) if name else None
    if folder is None or not weights_bytes(folder):
        return None
    return read_source(folder)


def weights_bytes(folder: Path) -> int:
    """Total size of the safetensors files in `folder`, in bytes."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type without its prefix.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
