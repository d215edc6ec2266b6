"""FP8 numbers in blocks, each with a scale."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

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
