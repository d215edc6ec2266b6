"""Sums over routed tokens for each atom, from which all scores are computed.

Shapes: E n_experts, I d_inter; rows of h, g are routed (token, slot) pairs sorted by
expert, n in all. Letters: h atom activation, g = dl/dh its gradient (nats per unit of
h), p routing weight, T_i tokens routed to expert i.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

SUMS = ("sum_h2", "sum_g2", "sum_hg", "sum_hg2", "sum_abs_h", "sum_ph2")
"""Atom columns that are summed over tokens, batches and runs."""
MAXIMA = ("max_abs_h", "max_abs_ph")
"""Atom columns whose maximum is kept."""
EXPERT_SUMS = ("tokens", "sum_p", "sum_p_out")
"""Expert columns that are summed."""
_Reduced = tuple[torch.Tensor, torch.Tensor]
"""Sums (6, E, I) and maxima (2, E, I), in the order of `SUMS` and `MAXIMA`."""


class LayerMoments:
    """Running sums of one MoE layer.

    Products are in float32 or wider and are summed within a batch in that precision
    (pairwise, or in pieces of 256 rows); sums across batches are in float64 if the
    device supports it.
    """

    def __init__(self, n_experts: int, d_inter: int, device: torch.device) -> None:
        wide = torch.float32 if device.type == "mps" else torch.float64

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=wide, device=device)

        self._sums = zeros(len(SUMS), n_experts, d_inter)
        self._maxima = zeros(len(MAXIMA), n_experts, d_inter)
        self.atoms = dict(zip(SUMS, self._sums, strict=True))
        self.atoms |= dict(zip(MAXIMA, self._maxima, strict=True))
        self.experts = {name: zeros(n_experts) for name in EXPERT_SUMS}

    def add(
        self,
        h: torch.Tensor,
        g: torch.Tensor,
        *,
        p: torch.Tensor,
        out_norm: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Add one batch; on a GPU with Triton the host does not wait for it.

        Shapes: h, g (n, I); p, out_norm (n,), where out_norm is the Euclidean norm of
        an expert's output before its routing weight; tokens: rows of each expert, (E,).
        """
        wide = torch.float64 if h.dtype == torch.float64 else torch.float32
        p = p.to(wide)
        reduce, total = _ways(h.device)
        sums, maxima = reduce(h, g, p, tokens)
        self._sums += sums
        torch.maximum(self._maxima, maxima.to(self._maxima.dtype), out=self._maxima)
        self.experts["tokens"] += tokens
        self.experts["sum_p"] += total(p, tokens)
        self.experts["sum_p_out"] += total(p * out_norm.to(wide), tokens)

    def state(self) -> dict[str, torch.Tensor]:
        """Every running sum by name, on the CPU, as `load_state` reads it."""
        return {name: t.cpu() for name, t in (self.atoms | self.experts).items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the sums by those of an earlier `state`."""
        for name, total in (self.atoms | self.experts).items():
            total.copy_(state[name])


def _ways(device: torch.device) -> tuple[Callable[..., _Reduced], Callable[..., Any]]:
    """How matrices and vectors are reduced on a device."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return one_by_one, _totals
    from heapr_lab.models import moments_kernel

    return moments_kernel.at_once, moments_kernel.totals


def one_by_one(
    h: torch.Tensor, g: torch.Tensor, p: torch.Tensor, tokens: torch.Tensor
) -> _Reduced:
    """The sums and maxima over each expert's rows, one expert after the other.

    On a CPU the rows of one expert stay in the processor's cache.

    Shapes: h, g (n, I); p (n,) in the type of the results; tokens (E,).
    """
    shape = len(tokens), h.shape[1]
    sums, maxima = (p.new_zeros(len(names), *shape) for names in (SUMS, MAXIMA))
    start = 0
    for expert, count in enumerate(tokens.tolist()):
        if count:
            rows = slice(start, start + count)
            views = [*sums[:, expert], *maxima[:, expert]]
            out = dict(zip(SUMS + MAXIMA, views, strict=True))
            _measure(h[rows].to(p.dtype), g[rows].to(p.dtype), p[rows], out)
            start += count
    return sums, maxima


def _totals(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The sum over each expert's rows of x (n,), (E,)."""
    return torch.stack([rows.sum() for rows in x.split(tokens.tolist())])


def _measure(
    h: torch.Tensor, g: torch.Tensor, p: torch.Tensor, out: dict[str, torch.Tensor]
) -> None:
    """Write the sums and maxima over one expert's rows into `out`.

    All products use the same buffer, which stays in the processor's cache.

    Shapes: h, g (n, I); p (n,); each of `out` (I,).
    """
    x = h * h
    torch.sum(x, 0, out=out["sum_h2"])
    torch.mv(x.T, p * p, out=out["sum_ph2"])
    torch.mul(g, g, out=x)
    torch.sum(x, 0, out=out["sum_g2"])
    torch.mul(h, g, out=x)
    torch.sum(x, 0, out=out["sum_hg"])
    torch.sum(x.square_(), 0, out=out["sum_hg2"])
    torch.abs(h, out=x)
    torch.sum(x, 0, out=out["sum_abs_h"])
    torch.amax(x, 0, out=out["max_abs_h"])
    torch.amax(x.mul_(p.abs()[:, None]), 0, out=out["max_abs_ph"])
