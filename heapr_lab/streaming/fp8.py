"""FP8 weights: numbers in blocks, each with a scale, and what reads them from files.

transformers derives the size from the grid of scales, and divides rows and columns
evenly among them. That is wrong wherever the last block is smaller than the others: 24
rows in blocks of 16 have a scale for 16 rows and one for 8, not two for 12.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import FineGrainedFP8Config
from transformers.core_model_loading import WeightConverter
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import (
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from heapr_lab.models.dtypes import FP8

SCALES = "_scale_inv"
"""What is added to the name of a weight in that of its scales."""
BLOCK_OF_FP4 = 1, 32
"""Rows and columns of a block of four-bit numbers, of which each byte has two."""
_OURS = "heapr_fp8"
"""The format under which transformers finds the classes below."""
_EIGHT_BITS = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantised(
    weight: torch.Tensor,
    block: Sequence[int],
    scales: torch.dtype = torch.float32,
    *,
    powers: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers of a weight, and the scale of each block.

    The largest number of a block is the largest of its type (e4m3): 448.

    Shapes: weight (..., rows, columns); scales (..., blocks of rows, of columns).

    Args:
        weight: in floats.
        block: rows and columns of a block, of which the last may be smaller.
        scales: their type.
        powers: whether they are powers of two, the next ones above.
    """
    wide, (rows, columns) = weight.float(), block
    missing = 0, -wide.shape[-1] % columns, 0, -wide.shape[-2] % rows
    tiles = F.pad(wide, missing).unflatten(-1, (-1, columns))
    tiles = tiles.unflatten(-3, (-1, rows))
    grid = tiles.abs().amax((-3, -1)) / _LARGEST
    grid = grid.clamp(min=torch.finfo(torch.float32).tiny)
    if powers:
        mantissa, exponent = torch.frexp(grid)
        grid = torch.ldexp(torch.ones_like(grid), exponent - (mantissa == 0.5).int())
    grid = grid.to(scales)
    numbers = wide / _of_each(grid.float(), wide.shape, block)
    return numbers.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), grid


def dequantised(
    numbers: torch.Tensor, scales: torch.Tensor, block: Sequence[int]
) -> torch.Tensor:
    """The weight of FP8 numbers and of the scale of each block, in float32.

    Shapes: as in `quantised`.
    """
    return numbers.float() * _of_each(scales.float(), numbers.shape, block)


def _of_each(
    scales: torch.Tensor, shape: torch.Size, block: Sequence[int]
) -> torch.Tensor:
    """The scale of each number, by its block."""
    rows = scales.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


# --- when files are read ----------------------------------------------------------


def with_exact_blocks(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of quantised weights, read by the classes below if they are FP8."""
    if settings.get("quant_method") != FP8:
        return settings
    return settings | {"quant_method": _OURS}


def check_grid(
    weight: tuple[int, ...], scales: tuple[int, ...], block: Sequence[int] | None
) -> None:
    """Check that there is one scale for each block, of which the last may be smaller.

    Args:
        weight: shape of the weights, (..., rows, columns).
        scales: shape of their scales; one without axes is that of the whole matrix.
        block: rows and columns of a block, if the configuration names them; else one
            scale is expected for the whole matrix.

    Raises:
        ValueError: there are others.
    """
    rows, columns = block or weight[-2:]
    expected = -(-weight[-2] // rows), -(-weight[-1] // columns)
    if len(scales) > 1 and tuple(scales[-2:]) != expected:
        raise ValueError(
            f"weights of {tuple(weight)} have scales of {tuple(scales)}, expected "
            f"{expected[0]} x {expected[1]} for blocks of {rows} x {columns} "
            "(as config.json says): download both again"
        )


class BlockDequantize(Fp8Dequantize):
    """transformers' operation, on weights that are padded to whole blocks."""

    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        if quantized.dtype == torch.int8:
            rows, columns = quantized.shape[-2:]
            check_grid((rows, 2 * columns), scales.shape, BLOCK_OF_FP4)
        if quantized.dtype not in _EIGHT_BITS or scales.dim() < 2:
            return super()._dequantize_one(quantized, scales, *args, **options)
        block = self.hf_quantizer.quantization_config.weight_block_size
        check_grid(quantized.shape, scales.shape, block)
        rows, columns = quantized.shape[-2:]
        n_rows, n_columns = block or (rows, columns)
        missing = 0, -columns % n_columns, 0, -rows % n_rows
        padded = F.pad(quantized.float(), missing)
        whole = super()._dequantize_one(padded, scales, *args, **options)
        return whole[..., :rows, :columns].contiguous()


@register_quantization_config(_OURS)
class Fp8Config(FineGrainedFP8Config):
    """transformers' settings, for weights that are always dequantised."""

    def post_init(self) -> None:
        """Check the settings."""
        super().post_init()
        self.dequantize = True


@register_quantizer(_OURS)
class Fp8Quantizer(FineGrainedFP8HfQuantizer):
    """transformers' quantizer, with blocks of the size that is configured."""

    def update_weight_conversions(self, conversions: Any, *args: Any) -> list[Any]:
        """The conversions, with transformers' operation replaced by `BlockDequantize`.

        Args:
            conversions: of the model's family.
            args: the model, in versions of transformers that give it.
        """
        converters: list[Any] = super().update_weight_conversions(conversions, *args)
        for converter in converters:
            if isinstance(converter, WeightConverter):
                converter.operations = [
                    BlockDequantize(self) if isinstance(op, Fp8Dequantize) else op
                    for op in converter.operations
                ]
        return converters
