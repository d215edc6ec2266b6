"""Experts of different widths in one module: what is left after real slicing.

Shapes: E n_experts, D d_expert, w_e atoms kept of expert e, W = sum of w_e.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from heapr_lab.experts import ExpertsLayer, activate
from heapr_lab.specs import SpecError


class RaggedExperts(nn.Module):
    """The kept atoms of one layer's experts, packed one expert after the other.

    Takes the place of the family's own experts module and its arguments. An expert
    without atoms gives its output bias, or nothing.
    """

    def __init__(self, layer: ExpertsLayer, keep: torch.Tensor) -> None:
        """Copy what `keep` (E, I) says stays of `layer`.

        Raises:
            SpecError: `keep` has another shape than the layer.
        """
        super().__init__()
        check_keep(layer, keep)
        self.family: Any = _without_weights(layer.module)
        self.heapr_widths = keep.sum(1).tolist()
        """Atoms of each expert, (E,)."""
        self.d_expert = layer.d_expert
        atoms = [row.nonzero()[:, 0].to(layer.device) for row in keep]
        rows = [layer.atom_rows(kept) for kept in atoms]
        self.up_rows = _packed([layer.up_rows[e][r] for e, r in enumerate(rows)])
        self.down_columns = _packed([layer.down[e].T[a] for e, a in enumerate(atoms)])
        """Columns of W_down as rows, (W, D)."""
        self.up_bias = self.down_bias = None
        up_bias, down_bias = layer.up_bias, layer.down_bias
        if up_bias is not None and down_bias is not None:
            self.up_bias = _packed([up_bias[e][r] for e, r in enumerate(rows)])
            self.down_bias = nn.Parameter(down_bias.detach().clone())

    @property
    def factor(self) -> int:
        """Rows of the input projection for each atom: 2 with a gate, else 1."""
        return 2 if self.family.has_gate else 1

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The routed experts' weighted sum.

        Shapes: hidden_states (T, D); top_k_index, top_k_weights (T, K); result (T, D).
        """
        n_slots = top_k_index.shape[-1]
        n_experts = len(self.heapr_widths)
        experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
        tokens = torch.bincount(experts, minlength=n_experts).tolist()
        x = hidden_states[order // n_slots]
        parts = [
            self._expert(expert, rows)
            for expert, rows in enumerate(x.split(tokens))
            if len(rows)
        ]
        out = torch.cat(parts) if parts else x
        if self.family.has_post_expert_norm:
            out = self.family.post_expert_norm(out)
        weighted = out * top_k_weights.reshape(-1)[order][:, None]
        unsorted = torch.empty_like(weighted).index_copy(0, order, weighted)
        total = unsorted.unflatten(0, (-1, n_slots)).sum(1)
        result: torch.Tensor = total.to(hidden_states.dtype)
        return result

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        start = sum(self.heapr_widths[:expert])
        atoms = slice(start, start + self.heapr_widths[expert])
        rows = slice(self.factor * atoms.start, self.factor * atoms.stop)
        up_bias = None if self.up_bias is None else self.up_bias[rows]
        h = activate(self.family, F.linear(x, self.up_rows[rows], up_bias))
        out = h @ self.down_columns[atoms]
        return out if self.down_bias is None else out + self.down_bias[expert]


def check_keep(layer: ExpertsLayer, keep: torch.Tensor) -> None:
    """Check that `keep` fits `layer`.

    Raises:
        SpecError: it has another shape.
    """
    expected = (layer.n_experts, layer.d_inter)
    if tuple(keep.shape) != expected:
        raise SpecError(
            f"the mask of layer {layer.layer} has shape {tuple(keep.shape)}, expected "
            f"{expected}: it was made for another model"
        )


def _packed(parts: list[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]).contiguous())


def _without_weights(module: nn.Module) -> nn.Module:
    """A copy that keeps activation, gating and norm, but no expert weights."""
    shell = copy.copy(module)
    shell._parameters = dict.fromkeys(module._parameters)
    shell._modules = copy.deepcopy(module._modules)  # a norm's weights are its own
    return shell
