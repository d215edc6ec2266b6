"""Experts made of matrices that several of them may share.

Each projection of an expert e is W_e = A_e + L_e R_e: a dense matrix, and a product of
two factors, any of which may be absent, or be that of other experts, too. So one module
runs merged experts (A shared by a group), experts of low rank (L_e R_e alone), a common
base with differences of low rank (A shared by all), and constants (an output bias
alone).

Shapes: E n_experts, D d_expert, I atoms of an expert.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from heapr_lab.models.ragged_experts import (
    activate,
    normalises,
    routed_sum,
    without_weights,
)

Matrices = Mapping[str, torch.Tensor]
"""What an expert is made of, without its activation, which stays the family's.

As `ExpertsLayer.expert` names them, `gate` (I, D) in families with a gate, `up` (I, D),
`down` (D, I), and the biases `gate_bias`, `up_bias` and `down_bias`; the factors of
each, such as `up_left` (out, rank) and `up_right` (rank, in). All may be absent."""
Composition = Sequence[Matrices]
"""The experts of one layer. What several of them have, as the same object, is one."""


def distinct(experts: Iterable[Matrices]) -> dict[int, tuple[str, torch.Tensor]]:
    """Each tensor of the experts once, by its `id`, with its name."""
    return {id(t): (name, t) for expert in experts for name, t in expert.items()}


def flops_of(expert: Matrices) -> int:
    """Operations of an expert for one token: 2 for each entry of its matrices."""
    return sum(2 * t.numel() for t in expert.values() if t.dim() == 2)


class ComposedExperts(nn.Module):
    """The experts of one layer, made of shared matrices.

    Replaces the family's own experts module, with the same arguments.
    """

    family: Any
    """The family's own module without weights: activation, gating and norm."""
    heapr_composed = True
    """The mark by which other code knows them."""

    @torch.no_grad()
    def __init__(self, module: Any, composition: Composition) -> None:
        """Copy the tensors of `composition` in place of the weights of `module`."""
        super().__init__()
        like = module.down_proj
        # Not a submodule, so that its own submodules keep their names.
        self.__dict__["family"] = without_weights(module)
        for name, child in self.family.named_children():
            self.add_module(name, child)
        names: dict[int, str] = {}
        for key, (name, tensor) in distinct(composition).items():
            names[key] = f"{name}_{len(names)}"
            copy = like.new_empty(tensor.shape).copy_(tensor)
            self.register_parameter(names[key], nn.Parameter(copy))
        self.experts = [
            {name: names[id(tensor)] for name, tensor in expert.items()}
            for expert in composition
        ]
        """The names of each expert's parameters."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The routed experts' weighted sum.

        Shapes: hidden_states (T, D); top_k_index, top_k_weights (T, K); result (T, D).
        """
        return routed_sum(
            self._expert, len(self.experts), hidden_states, top_k_index, top_k_weights
        )

    def _expert(self, expert: int, x: torch.Tensor) -> Any:
        parts = {
            k: self.get_parameter(name) for k, name in self.experts[expert].items()
        }
        rows = _projected(parts, "up", x)
        if rows is not None and self.family.has_gate:
            rows = _fused(self.family, _projected(parts, "gate", x), rows)
        h = x[:, :0] if rows is None else activate(self.family, rows)
        out = _projected(parts, "down", h)
        if out is None:
            out = torch.zeros_like(x)
        return self.family.post_expert_norm(out) if normalises(self.family) else out


def _projected(parts: Matrices, name: str, x: torch.Tensor) -> Any:
    """A projection of x (n, in), (n, out); None where there is nothing of it."""
    out = F.linear(x, parts[name]) if name in parts else None
    if f"{name}_left" in parts:
        low = F.linear(F.linear(x, parts[f"{name}_right"]), parts[f"{name}_left"])
        out = low if out is None else out + low
    bias = parts.get(f"{name}_bias")
    if bias is None:
        return out
    return bias.expand(len(x), -1) if out is None else out + bias


def _fused(family: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Both projections in the family's own order, (n, 2I)."""
    if family.is_concatenated:
        return torch.cat([gate, up], dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)
