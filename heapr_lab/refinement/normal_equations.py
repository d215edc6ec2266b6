"""Least squares from sums of products, for many problems of one layer at a time.

Shapes: P problems, F features of each, D d_expert; f free and r removed features, at
most, to which the columns of smaller problems are padded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from heapr_lab.refinement.activation_grams import LayerGrams

_IN_CACHE = 8 * 2**20
"""Bytes of products that a CPU works on at a time."""


def at_once(sums: torch.Tensor) -> int:
    """How many of the problems (P, F, F) are solved together: all on a GPU."""
    if sums.device.type != "cpu":
        return len(sums)
    return max(1, _IN_CACHE // (sums[0].numel() * sums.element_size()))


def in_turn(sums: torch.Tensor, *tensors: torch.Tensor) -> Iterator[Any]:
    """Tensors of P problems, for as many problems at a time as are solved together.

    Shapes: sums (P, F, F), the products of their features; tensors (P, …).
    """
    size = at_once(sums)
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def scarcity(grams: LayerGrams, d_inter: int) -> torch.Tensor:
    """The factor by which the ridge of an expert is raised, (E,) float64: 1 or more.

    With fewer tokens than atoms, products are those of a few directions, and most atoms
    would seem to be sums of others: d_inter / tokens. Else it is 1, so that the number
    of tokens does not matter.
    """
    tokens = grams.tokens.sum(0).clamp_min(1).to(grams.sums)
    return (d_inter / tokens).clamp_min(1.0)


def solved_by(factor: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """As `torch.cholesky_solve`, which takes many problems one by one on CUDA.

    Shapes: lower triangles (P, f, f); wanted and result (P, f, q).
    """
    if not factor.is_cuda:
        return torch.cholesky_solve(wanted, factor)
    half = torch.linalg.solve_triangular(factor, wanted, upper=False)
    solution: torch.Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solution


def small_factor(W: torch.Tensor) -> torch.Tensor:
    """A matrix R (P, min(D, F), F) with RᵀR = WᵀW, for W (P, D, F).

    The norm of W x is that of R x, for every x, but for rounding errors.
    """
    if W.shape[1] <= W.shape[2]:
        return W
    G = W.mT @ W
    size = G.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    G.diagonal(dim1=-2, dim2=-1).add_(1e-12 * size + 1e-300)
    factor: torch.Tensor = torch.linalg.cholesky(G).mT
    return factor.contiguous()


@dataclass(frozen=True)
class Columns:
    """Some of the features of each problem, the first ones of `index`."""

    index: torch.Tensor
    """(P, n) int64."""
    valid: torch.Tensor
    """(P, n) bool: whether it is a feature, or fills up."""

    @classmethod
    def of(cls, chosen: torch.Tensor) -> "Columns":
        """The features that are `chosen` (P, F)."""
        n = int(chosen.sum(1).max())
        order = chosen.byte().argsort(dim=1, descending=True, stable=True)[:, :n]
        return cls(order, chosen.gather(1, order))

    def of_products(self, products: torch.Tensor, other: "Columns") -> torch.Tensor:
        """Their rows of `products` (P, F, F) and the columns of `other`: (P, n, m)."""
        problem = torch.arange(len(products), device=products.device)[:, None, None]
        blocks = products[problem, self.index[:, :, None], other.index[:, None]]
        return blocks * (self.valid[:, :, None] & other.valid[:, None])

    def of_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Their columns of `weight` (P, D, F): (P, D, n)."""
        return weight.take_along_dim(self.index[:, None], 2) * self.valid[:, None]

    def put(self, values: torch.Tensor, weight: torch.Tensor) -> None:
        """Add `values` (P, D, n) to their columns of `weight` (P, D, F), in place."""
        index = self.index[:, None].expand(-1, weight.shape[1], -1)
        weight.scatter_add_(2, index, values * self.valid[:, None])


@dataclass(frozen=True)
class Normal:
    """Normal equations over some tokens, for a change X of the free columns."""

    A: torch.Tensor
    """Products of the free features, (P, f, f)."""
    wanted: torch.Tensor
    """Products of the free features with what is to be made up for, (P, f, q)."""
    dropped: torch.Tensor
    """Σ of squares of the output of the removed features: the error without X, (P,)."""
    metric: torch.Tensor | None
    """Products of the q columns' directions in the output, (P, q, q); None for 1."""

    def error(self, change: torch.Tensor) -> torch.Tensor:
        """Σ of squares of the error with the change X (P, f, q): (P,)."""
        seen = change if self.metric is None else change @ self.metric
        return self.dropped + (seen * (self.A @ change - 2 * self.wanted)).sum((1, 2))

    def solve(self, ridge: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The optimal X (P, f, q) under ridges (P, f), and which were singular (P,).

        Ridges are relative to each feature's own products. A feature without any, which
        is not in the equations, stays as it is.
        """
        diag = self.A.diagonal(dim1=-2, dim2=-1)
        lifted = self.A + torch.diag_embed(torch.where(diag > 0, ridge * diag, 1.0))
        factor, info = torch.linalg.cholesky_ex(lifted)
        change = solved_by(factor, self.wanted)
        singular = (info > 0) | ~torch.isfinite(change).all(2).all(1)
        for k in singular.nonzero()[:, 0].tolist():
            change[k] = torch.linalg.pinv(lifted[k], hermitian=True) @ self.wanted[k]
        return change, singular

    def __add__(self, other: "Normal") -> "Normal":
        return Normal(
            self.A + other.A,
            self.wanted + other.wanted,
            self.dropped + other.dropped,
            self.metric,
        )
