"""A small change of large weights: three levels for each value, five values a byte.

A fine-tuned weight differs little from the one it began with, and coarse values of the
difference are enough: each is −s, 0 or s, with one s for each row.
"""

from dataclasses import dataclass

import torch

_PER_BYTE = 5
_POWERS = torch.tensor([3**place for place in range(_PER_BYTE)])
_N_FITS = 6


@dataclass(frozen=True, eq=False)
class Ternary:
    """A matrix of the values −1, 0 and 1, with a scale for each row."""

    packed: torch.Tensor
    """Five values in each byte, in the order of the matrix: (⌈n/5⌉,) uint8."""
    scale: torch.Tensor
    """The scale of each row, (n_rows,) float16."""
    n_columns: int

    def values(self) -> torch.Tensor:
        """The matrix, (n_rows, n_columns) float32."""
        digits = self.packed.long()[:, None] // _POWERS % 3
        n_rows = len(self.scale)
        signs = digits.flatten()[: n_rows * self.n_columns].float() - 1
        return signs.view(n_rows, self.n_columns) * self.scale.float()[:, None]


def ternary(matrix: torch.Tensor) -> Ternary:
    """The nearest matrix of three levels a row, in the mean square (Lloyd's method).

    Shapes: matrix (n_rows, n_columns).
    """
    size = matrix.float().abs()
    level = size.mean(1, keepdim=True)
    for _ in range(_N_FITS):
        outer = (size > level / 2).float()
        level = (size * outer).sum(1, keepdim=True) / outer.sum(1, keepdim=True).clamp(
            min=1
        )
    scale = level[:, 0].half()
    signs = torch.where(size > scale.float()[:, None] / 2, matrix.sign(), 0.0)
    digits = (signs + 1).long().flatten()
    padding = -len(digits) % _PER_BYTE
    digits = torch.nn.functional.pad(digits, (0, padding)).view(-1, _PER_BYTE)
    packed = (digits * _POWERS).sum(1).to(torch.uint8)
    return Ternary(packed, scale, matrix.shape[1])
