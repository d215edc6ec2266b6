"""Linear maps of tokens sorted by expert: forward and backward, summed in float32."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def accumulating_dtype(x: torch.Tensor) -> torch.dtype:
    """The type in which sums over `x` are accumulated: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rows_of_experts(experts: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Number of rows of each expert, (E,); unlike `bincount`, without a host's wait.

    Shapes: experts (n,) in ascending order.
    """
    numbers = torch.arange(n_experts, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True)
    return torch.diff(ends, prepend=ends.new_zeros(1))


def routed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """The product of each row and its expert's matrix.

    Shapes: x (n, in); weight (E, out, in); bias (E, out); experts (n,); tokens (E,),
    those of `rows_of_experts`; out (n, out).
    """
    x = x.to(weight.dtype)  # under autocast they may differ
    if x.is_cuda and x.dtype != torch.float64:
        ends = tokens.cumsum(0).to(torch.int32)
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    else:
        out = _RoutedLinear.apply(x, weight, tokens.tolist())
    return out if bias is None else out + bias[experts]


class _RoutedLinear(torch.autograd.Function):
    """One product per expert, written directly into its rows of the result.

    Unlike autograd's own, it concatenates nothing, forward or backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, tokens: list[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.tokens = tokens
        out = x.new_empty(len(x), weight.shape[1])
        for w, rows, y in _by_expert(tokens, weight, x, out):
            torch.mm(rows, w.T, out=y)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.new_empty(len(grad), weight.shape[2])
            for w, rows, y in _by_expert(ctx.tokens, weight, grad, grad_x):
                torch.mm(rows, w, out=y)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
            for w, rows, y in _by_expert(ctx.tokens, grad_weight, x, grad):
                torch.mm(y.T, rows, out=w)
        return grad_x, grad_weight, None


def _by_expert(
    tokens: list[int], weight: torch.Tensor, *rows: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The matrix and the rows of each expert that has rows."""
    parts = zip(weight, *(x.split(tokens) for x in rows), strict=True)
    return (part for part, count in zip(parts, tokens, strict=True) if count)
