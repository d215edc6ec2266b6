"""The sums of `LayerMoments` on a GPU, in one pass over h and its gradient.

Imported only where there is Triton, which comes with torch for CUDA. The kernel reads
each number of h and g once, and nothing else of that size is read or written.

Shapes and letters are those of `moments`.
"""

import torch
import triton
import triton.language as tl

_N_SUMS, _N_MAXIMA = 5, 2
_PIECE = 256
"""Most rows that one program adds up."""
_ROWS, _COLUMNS = 4, 128
"""Numbers that a program reads at once."""


def at_once(
    h: torch.Tensor, g: torch.Tensor, p: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums and maxima over each expert's rows, all experts together.

    Shapes: h, g (n, I); p (n,) in the type of the results; tokens (E,).
    """
    h, g, p = h.contiguous(), g.contiguous(), p.contiguous()
    cuts, experts = _pieces(tokens, len(h))
    n_pieces, width = len(cuts) - 1, h.shape[1]
    sums = p.new_empty(n_pieces, _N_SUMS, width)
    maxima = p.new_empty(n_pieces, _N_MAXIMA, width)
    grid = n_pieces, triton.cdiv(width, _COLUMNS)
    with torch.cuda.device_of(h):  # Triton launches on the current device
        _reduce[grid](h, g, p, cuts, sums, maxima, width, _ROWS, _COLUMNS)
    of_experts = _segments(sums, "sum", experts), _segments(maxima, "max", experts)
    return of_experts[0].transpose(0, 1), of_experts[1].transpose(0, 1)


def _segments(x: torch.Tensor, how: str, offsets: torch.Tensor) -> torch.Tensor:
    """The sum or the maximum, at least 0, over the rows of each segment.

    Shapes: x (n, ...); offsets (S + 1,); result (S, ...).
    """
    return torch.segment_reduce(x, how, offsets=offsets, unsafe=True, initial=0)


def _with_zero(ends: torch.Tensor) -> torch.Tensor:
    return torch.cat([ends.new_zeros(1), ends])


def _pieces(tokens: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut n rows where an expert ends, and after every 256 rows.

    So experts with many rows take no longer than others, and float32 sums have few
    terms. The number of pieces depends on n and E alone, not on the routing; some are
    empty.

    Returns:
        The first row of each piece and n; the first piece of each expert and their
        number.
    """
    ends = tokens.cumsum(0)
    cuts = torch.arange(0, n, _PIECE, device=tokens.device)
    cuts, _ = torch.cat([cuts, ends]).sort()
    return cuts, _with_zero(torch.searchsorted(cuts, ends))


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    h,
    g,
    p,
    cuts,
    sums,
    maxima,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write what one piece adds, in the order of `SUMS` and `MAXIMA` in `moments`.

    Shapes: cuts (pieces + 1,); sums (pieces, 5, width); maxima (pieces, 2, width).
    """
    piece = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    end = tl.load(cuts + piece + 1)
    wide = p.dtype.element_ty
    h2 = tl.zeros((ROWS, COLUMNS), wide)
    g2, hg, hg2, ph2, max_h, max_ph = h2, h2, h2, h2, h2, h2
    for first in range(tl.load(cuts + piece), end, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * width + columns
        valid = (rows < end)[:, None] & inside
        x = tl.load(h + at, mask=valid, other=0).to(wide)
        y = tl.load(g + at, mask=valid, other=0).to(wide)
        q = tl.load(p + rows, mask=rows < end, other=0)[:, None]
        size = tl.abs(x)
        product = x * y
        weighted = tl.abs(q * x)
        h2 += x * x
        g2 += y * y
        hg += product
        hg2 += product * product
        ph2 += weighted * weighted
        max_h = tl.maximum(max_h, size)
        max_ph = tl.maximum(max_ph, weighted)
    out = sums + piece * 5 * width + columns
    tl.store(out, tl.sum(h2, 0), mask=inside)
    tl.store(out + width, tl.sum(g2, 0), mask=inside)
    tl.store(out + 2 * width, tl.sum(hg, 0), mask=inside)
    tl.store(out + 3 * width, tl.sum(hg2, 0), mask=inside)
    tl.store(out + 4 * width, tl.sum(ph2, 0), mask=inside)
    out = maxima + piece * 2 * width + columns
    tl.store(out, tl.max(max_h, 0), mask=inside)
    tl.store(out + width, tl.max(max_ph, 0), mask=inside)
