"""A gated feed-forward layer, dense or carved, as three wide products.

While a carved model is trained most experts are active for a token, so it is fastest to
compute all neurons and to multiply those of each expert by its gate, which is 0 where
the expert was not chosen. `pretrained.carved` makes the stock model of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from heapr_lab.pretrained.carved import (
    GATE_SCALE,
    MATRICES,
    PER_BYTE,
    POWERS,
    Layout,
    Ternary,
)

_N_FITS = 6
"""Rounds in which the levels of a matrix are fitted."""


@dataclass(frozen=True, eq=False)
class Carving:
    """How one layer was divided."""

    order: torch.Tensor
    """The neurons, those of the shared part first, then expert by expert: (d_ff,)."""
    router: torch.Tensor
    """Weights of the router, (n_experts, d_model) float32."""
    bias: torch.Tensor
    """Correction of the choice of experts, (n_experts,) float32."""
    captured: float
    """Share of the energy of the calibration tokens in the neurons that they use."""


class GatedFfn(nn.Module):
    """W_down·(silu(W_gate x) ⊙ W_up x), every neuron for every token."""

    def __init__(
        self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> None:
        """The layer of weights (d_ff, d_model), (d_ff, d_model), (d_model, d_ff)."""
        super().__init__()
        self.gate_proj, self.up_proj = nn.Parameter(gate), nn.Parameter(up)
        self.down_proj = nn.Parameter(down)

    def neurons(self, x: torch.Tensor) -> torch.Tensor:
        """The activation h of every neuron: (..., d_ff)."""
        return F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)

    def energies(self, x: torch.Tensor) -> torch.Tensor:
        """(h_k·‖w_down,k‖)² of each neuron for each token: (n, d_ff)."""
        sizes: torch.Tensor = self.down_proj.norm(dim=0)
        return (self.neurons(x) * sizes).square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for x: (..., d_model)."""
        return F.linear(self.neurons(x), self.down_proj)


class CarvedFfn(GatedFfn):
    """The same neurons in their new order, those of chosen experts alone."""

    def __init__(self, dense: GatedFfn, carving: Carving, layout: Layout) -> None:
        """The layer `dense`, divided by `carving`."""
        order = carving.order
        super().__init__(
            dense.gate_proj.detach()[order].clone(),
            dense.up_proj.detach()[order].clone(),
            dense.down_proj.detach()[:, order].clone(),
        )
        self.layout, self.order = layout, order
        dtype = dense.gate_proj.dtype
        self.router = nn.Parameter(carving.router.to(dtype, copy=True))
        self.expert_scale = nn.Parameter(torch.ones(layout.n_experts, dtype=dtype))
        self.bias = nn.Buffer(carving.bias.to(dtype, copy=True))
        self.load = torch.zeros(layout.n_experts)
        """Tokens of each expert since this was last set to 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for x: (..., d_model)."""
        layout = self.layout
        gates = F.linear(x, self.router).sigmoid()
        chosen = (gates.detach() + self.bias).topk(layout.top_k, -1).indices
        mask = torch.zeros_like(gates).scatter_(-1, chosen, 1.0)
        self.load += mask.detach().flatten(0, -2).sum(0)
        gates = gates * mask * GATE_SCALE * self.expert_scale
        wide = gates.repeat_interleave(layout.d_inter, -1)
        if layout.n_shared:
            wide = F.pad(wide, (layout.n_shared, 0), value=1.0)
        return F.linear(self.neurons(x) * wide, self.down_proj)

    @torch.no_grad()
    def round_change(self, dense: GatedFfn) -> dict[str, Ternary]:
        """Round the changes of `dense` to three levels, in place, and return them."""
        changes = {}
        for name in MATRICES:
            matrix, base = _rows(self, name), _rows(dense, name)[self.order]
            changes[name] = ternary(matrix - base)
            matrix.copy_(base + changes[name].values())
        return changes


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
    padding = -len(digits) % PER_BYTE
    digits = F.pad(digits, (0, padding)).view(-1, PER_BYTE)
    packed = (digits * POWERS).sum(1).to(torch.uint8)
    return Ternary(packed, scale, matrix.shape[1])


def _rows(ffn: GatedFfn, name: str) -> torch.Tensor:
    """A matrix of a layer with one row for each neuron, as a view."""
    weight: torch.Tensor = getattr(ffn, f"{name}_proj").data
    return weight.T if name == "down" else weight


def dense_ffns(model: Any) -> None:
    """Replace, in place, the experts of a model with one a layer by `GatedFfn`."""
    for layer in model.model.layers:
        experts = layer.mlp.experts
        gate, up = experts.gate_up_proj.detach()[0].chunk(2)
        layer.mlp = GatedFfn(
            gate.clone(), up.clone(), experts.down_proj.detach()[0].clone()
        )


def load_shares(model: Any) -> torch.Tensor:
    """The load of each expert over its fair share, (n_layers, n_experts)."""
    loads = torch.stack([layer.mlp.load for layer in model.model.layers])
    return loads / loads.mean(1, keepdim=True)
