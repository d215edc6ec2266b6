"""One expert of a layer on any tokens, whether or not they are routed to it.

Shapes: n tokens, D d_expert, I d_inter.
"""

import torch
import torch.nn.functional as F

from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.models.ragged_experts import activate, normalises


def projected_up(layer: ExpertsLayer, expert: int, x: torch.Tensor) -> torch.Tensor:
    """W_gate x and W_up x with their biases, (n, 2I) in the family's own order.

    Shapes: x (n, D); the result is (n, I) without a gate.
    """
    biases = layer.up_bias
    return F.linear(
        x, layer.up_rows[expert], None if biases is None else biases[expert]
    )


def projected_down(layer: ExpertsLayer, expert: int, h: torch.Tensor) -> torch.Tensor:
    """W_down h with its bias, and the family's norm if it has one: (n, I) to (n, D)."""
    biases = layer.down_bias
    f = F.linear(h, layer.down[expert], None if biases is None else biases[expert])
    return layer.module.post_expert_norm(f) if normalises(layer.module) else f


def activations(layer: ExpertsLayer, expert: int, x: torch.Tensor) -> torch.Tensor:
    """The activations h of an expert's atoms: (n, D) to (n, I)."""
    return activate(layer.module, projected_up(layer, expert, x))


def expert_output(layer: ExpertsLayer, expert: int, x: torch.Tensor) -> torch.Tensor:
    """What an expert makes of x with routing weight 1: (n, D) to (n, D)."""
    return projected_down(layer, expert, activations(layer, expert, x))
