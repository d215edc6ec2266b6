"""The files a model was loaded from: their folder, size, and type of weights.

Importing this needs no torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heapr_lab.models.formats import DEQUANTISED, FP8, block_of, blocks_fit
from heapr_lab.models.named import local_folder

if TYPE_CHECKING:
    import torch

_UNKNOWN = "unknown type"
_IN_BFLOAT16 = 2.0
"""Bytes of a number in bfloat16."""


@dataclass(frozen=True)
class Source:
    """A checkpoint on this machine."""

    n_bytes: int
    """Size of its safetensors files."""
    dtype_name: str = _UNKNOWN
    """Type of its weights in its configuration, such as bfloat16."""
    dequantised_from: str | None = None
    """The format of weights that are dequantised when they are read."""
    block: tuple[int, int] | None = None
    """Rows and columns of the blocks of weights in FP8, if they are in blocks."""
    folder: Path = Path()

    def bytes_per_parameter(self, n_parameters: int) -> float:
        """Its size over the number of parameters of the model that it holds."""
        return self.n_bytes / n_parameters

    def bytes_per_kept(self, n_parameters: int, width: int | None) -> float:
        """The same for what is written when it is pruned to a width, if it is one.

        Dequantised weights are written in bfloat16, if not in FP8.
        """
        if self.is_dequantised(width):
            return _IN_BFLOAT16
        return self.bytes_per_parameter(n_parameters)

    def is_dequantised(self, width: int | None) -> bool:
        """Whether what is written is in floats, and was quantised."""
        return self.dequantised_from is not None and not blocks_fit(self.block, width)

    @property
    def dtype(self) -> "torch.dtype | None":
        """The type of its weights; None if its configuration does not say."""
        import torch

        return getattr(torch, self.dtype_name, None)


def read_source(folder: Path) -> Source:
    """The checkpoint in `folder`.

    Raises:
        SpecError: its configuration is damaged.
    """
    from heapr_lab.models.folders import quantisation, read_config

    config = read_config(folder)
    method = quantisation(config)
    return Source(
        weights_bytes(folder),
        _UNKNOWN if config.dtype is None else dtype_name(config.dtype),
        method if method in DEQUANTISED else None,
        block_of(config.quantization_config) if method == FP8 else None,
        folder,
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


def dtype_name(dtype: "torch.dtype") -> str:
    """The name of a type without its prefix.

    Example:
        >>> import torch
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
