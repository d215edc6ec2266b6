"""Linear maps of tokens sorted by expert: forward and backward, summed in float32.

Shapes: T tokens of width D, n routed rows sorted by expert, E experts of width I.
"""

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
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of each row, or of the token that it names, and its expert's matrix.

    On a CPU the tokens of one expert at a time are gathered, which stay in the
    processor's cache; all of them would be as large as K times the layer's input.

    Shapes: x (T, in), or (n, in) without `rows`; weight (E, out, in); bias (E, out);
    experts (n,); tokens (E,), those of `rows_of_experts`; rows (n,) the token of each
    row; result (n, out).
    """
    x = x.to(weight.dtype)  # under autocast they may differ
    if x.is_cuda and rows is not None:
        x, rows = x[rows], None
    if x.is_cuda and x.dtype != torch.float64:
        ends = tokens.cumsum(0).to(torch.int32)
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    else:
        out = _RoutedLinear.apply(x, weight, rows, tokens.tolist())
    return out if bias is None else out + bias[experts]


def scattered_linear(
    h: torch.Tensor,
    weight: torch.Tensor,
    p: torch.Tensor,
    *,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    n_tokens: int,
) -> torch.Tensor:
    """The sum of p W h over the rows of each token.

    No row's output is kept, because the gradient of p is ⟨g, W h⟩ = ⟨Wᵀ g, h⟩.

    Shapes: h (n, I); weight (E, D, I); p (n,); rows (n,) the token of each row; tokens
    (E,), those of `rows_of_experts`; result (n_tokens, D).
    """
    total: torch.Tensor = _ScatteredLinear.apply(
        h, weight, p, rows, tokens.tolist(), n_tokens
    )
    return total


class _RoutedLinear(torch.autograd.Function):
    """Row k of the result is W x[rows[k]], without `rows` W x[k], W that of its expert.

    Products are written directly into the result: unlike autograd's own, it
    concatenates nothing, forward or backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        rows: torch.Tensor | None,
        tokens: list[int],
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, rows)
        ctx.tokens, ctx.n_tokens = tokens, len(x)
        out = x.new_empty(sum(tokens), weight.shape[1])
        for w, part, y in _by_expert(tokens, weight, x if rows is None else rows, out):
            torch.mm(_taken(x, rows, part), w.T, out=y)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, rows = ctx.saved_tensors
        grad_x = grad_weight = None
        shape = ctx.n_tokens, weight.shape[2]
        if ctx.needs_input_grad[0] and rows is None:
            grad_x = grad.new_empty(shape)
            for w, g, back in _by_expert(ctx.tokens, weight, grad, grad_x):
                torch.mm(g, w, out=back)
        elif ctx.needs_input_grad[0]:
            total = grad.new_zeros(shape, dtype=accumulating_dtype(grad))
            for w, index, g in _by_expert(ctx.tokens, weight, rows, grad):
                total.index_add_(0, index, (g @ w).to(total.dtype))
            grad_x = total.to(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
            places = x if rows is None else rows
            for w, part, g in _by_expert(ctx.tokens, grad_weight, places, grad):
                torch.mm(g.T, _taken(x, rows, part), out=w)
        return grad_x, grad_weight, None, None


def _taken(
    x: torch.Tensor, rows: torch.Tensor | None, part: torch.Tensor
) -> torch.Tensor:
    """The rows of x that a part of `rows` names; without `rows`, a part of x itself."""
    return part if rows is None else x.index_select(0, part)


class _ScatteredLinear(torch.autograd.Function):
    """The sum of p W h over the rows of each token."""

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        weight: torch.Tensor,
        p: torch.Tensor,
        rows: torch.Tensor,
        tokens: list[int],
        n_tokens: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(h, weight, p, rows)
        ctx.tokens = tokens
        wide = torch.promote_types(weight.dtype, p.dtype)
        total = h.new_zeros(n_tokens, weight.shape[1], dtype=wide)
        for w, x, q, index in _by_expert(tokens, weight, h, p, rows):
            y = x.to(w.dtype) @ w.T
            total.index_add_(0, index, (y * q[:, None]).to(wide))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, weight, p, rows = ctx.saved_tensors
        grad_h, grad_p = torch.empty_like(h), torch.empty_like(p)
        inputs = _by_expert(ctx.tokens, weight, h, p, rows, grad_h, grad_p)
        for w, x, q, index, back_x, back_q in inputs:
            back = grad.index_select(0, index).to(w.dtype) @ w
            back_q.copy_((back * x).sum(1, dtype=accumulating_dtype(back)))
            torch.mul(back, q[:, None], out=back_x)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
            for w, x, q, index in _by_expert(ctx.tokens, grad_weight, h, p, rows):
                g = grad.index_select(0, index) * q[:, None]
                torch.mm(g.T.to(w.dtype), x.to(w.dtype), out=w)
        return grad_h, grad_weight, grad_p, None, None, None


def _by_expert(
    tokens: list[int], weight: torch.Tensor, *rows: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The matrix and the rows of each expert that has rows."""
    parts = zip(weight, *(x.split(tokens) for x in rows), strict=True)
    return (part for part, count in zip(parts, tokens, strict=True) if count)
