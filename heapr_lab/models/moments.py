"""Sums over routed tokens for each atom, from which all scores are computed.

Shapes: E n_experts, I d_inter; rows of h, g are routed (token, slot) pairs sorted by
expert, n in all. Letters: h atom activation, g = dl/dh its gradient (nats per unit of
h), p routing weight, T_i tokens routed to expert i.
"""

import torch

SUMS = ("sum_h2", "sum_g2", "sum_hg", "sum_hg2", "sum_abs_h", "sum_ph2")
"""Atom columns that are summed over tokens, batches and runs."""
MAXIMA = ("max_abs_h", "max_abs_ph")
"""Atom columns whose maximum is kept."""
EXPERT_SUMS = ("tokens", "sum_p", "sum_p_out")
"""Expert columns that are summed."""


class LayerMoments:
    """Running sums of one MoE layer.

    Products are in float32 or wider and are summed within a batch in that precision
    (pairwise); sums across batches are in float64 if the device supports it.
    """

    def __init__(self, n_experts: int, d_inter: int, device: torch.device) -> None:
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.atoms = {
            name: torch.zeros(n_experts, d_inter, dtype=wide, device=device)
            for name in SUMS + MAXIMA
        }
        self.experts = {
            name: torch.zeros(n_experts, dtype=wide, device=device)
            for name in EXPERT_SUMS
        }

    def add(
        self,
        h: torch.Tensor,
        g: torch.Tensor,
        *,
        p: torch.Tensor,
        out_norm: torch.Tensor,
        tokens: list[int],
    ) -> None:
        """Add one batch.

        Shapes: h, g (n, I); p, out_norm (n,), where out_norm is the Euclidean norm of
        an expert's output before its routing weight; tokens: rows of each expert, (E,).
        """
        wide = torch.float64 if h.dtype == torch.float64 else torch.float32
        batch = {
            name: torch.zeros_like(total, dtype=wide)
            for name, total in self.atoms.items()
        }
        start = 0
        for expert, count in enumerate(tokens):
            if count:
                rows = slice(start, start + count)
                out = {name: values[expert] for name, values in batch.items()}
                _measure(h[rows].to(wide), g[rows].to(wide), p[rows].to(wide), out)
                start += count
        for name in SUMS:
            self.atoms[name] += batch[name]
        for name in MAXIMA:
            total = self.atoms[name]
            torch.maximum(total, batch[name].to(total.dtype), out=total)
        p = p.to(wide)
        p_out = p * out_norm.to(wide)
        counts = torch.tensor(tokens, device=p.device)
        self.experts["tokens"] += counts
        self.experts["sum_p"] += torch.stack([x.sum() for x in p.split(tokens)])
        self.experts["sum_p_out"] += torch.stack([x.sum() for x in p_out.split(tokens)])

    def state(self) -> dict[str, torch.Tensor]:
        """Every running sum by name, on the CPU, as `load_state` reads it."""
        return {name: t.cpu() for name, t in (self.atoms | self.experts).items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the sums by those of an earlier `state`."""
        for name, total in (self.atoms | self.experts).items():
            total.copy_(state[name])


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
