"""One expert of a layer on any tokens, whether or not they are routed to it.

Shapes: n tokens, D d_expert, I d_inter.
"""

import torch
import torch.nn.functional as F

from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.models.ragged_experts import activate, normalises


def activations(layer: ExpertsLayer, expert: int, x: torch.Tensor) -> torch.Tensor:
    """The activations h of an expert's atoms: (n, D) to (n, I)."""
    biases = layer.up_bias
    bias = None if biases is None else biases[expert]
    return activate(layer.module, F.linear(x, layer.up_rows[expert], bias))


def expert_output(layer: ExpertsLayer, expert: int, x: torch.Tensor) -> torch.Tensor:
    """What an expert makes of x with routing weight 1: (n, D) to (n, D)."""
    biases = layer.down_bias
    bias = None if biases is None else biases[expert]
    f = F.linear(activations(layer, expert, x), layer.down[expert], bias)
    return layer.module.post_expert_norm(f) if normalises(layer.module) else f
