"""Sums over routed tokens for each atom, from which all scores are computed.

Shapes: E n_experts, I d_inter; rows of h, g are routed (token, slot) pairs sorted by
expert, n in all. Letters: h atom activation, g = dl/dh its gradient (nats per unit of
h), p routing weight, T_i tokens routed to expert i.
"""

import importlib.util
from collections.abc import Callable

import torch

from heapr_lab.models.grouped_linear import accumulating_dtype

SUMS = ("sum_h2", "sum_g2", "sum_hg", "sum_hg2", "sum_ph2")
"""Atom columns that are summed over tokens, batches and runs."""
MAXIMA = ("max_abs_h", "max_abs_ph")
"""Atom columns whose maximum is kept."""
_Reduced = tuple[torch.Tensor, torch.Tensor]
"""Sums (5, E, I) and maxima (2, E, I), in the order of `SUMS` and `MAXIMA`."""


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
        self.tokens = zeros(n_experts)
        self.times = 0
        """Batches that were added since this was last set to 0."""

    def add(
        self, h: torch.Tensor, g: torch.Tensor, p: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Add one batch; on a GPU with Triton the host does not wait for it.

        Shapes: h, g (n, I); p (n,); tokens: rows of each expert, (E,).
        """
        sums, maxima = _reduction(h.device)(h, g, p.to(accumulating_dtype(h)), tokens)
        self._sums += sums
        torch.maximum(self._maxima, maxima.to(self._maxima.dtype), out=self._maxima)
        self.tokens += tokens
        self.times += 1

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Every running sum and maximum by name, of atoms (E, I) and experts (E,)."""
        return {**self.atoms, "tokens": self.tokens}

    def state(self) -> dict[str, torch.Tensor]:
        """All of `named` on the CPU, as `load_state` reads it."""
        return {name: total.cpu() for name, total in self.named.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the sums by those of an earlier `state`."""
        for name, total in self.named.items():
            total.copy_(state[name])


def _reduction(device: torch.device) -> Callable[..., _Reduced]:
    """What reduces the rows of all experts on a device."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return one_by_one
    from heapr_lab.models import moments_kernel

    return moments_kernel.at_once


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
    torch.amax(x, 0, out=out["max_abs_h"])
    torch.amax(x.mul_(p.abs()[:, None]), 0, out=out["max_abs_ph"])
