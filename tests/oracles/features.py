"""The features that least squares is solved in, written out token by token."""

import torch
from text_models import experts_calls
from torch import nn

from heapr_lab.models.experts import find_experts
from heapr_lab.refinement.activation_grams import LayerGrams, iter_grams
from heapr_lab.text.calibration import CalibrationSet
from oracles.token_by_token import atom_activations, matrices


@torch.no_grad()
def features_of(model: nn.Module, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """φ of every token, zeros and all, by layer: (n_tokens, E, I)."""
    calls, features = experts_calls(model, ids), {}
    for layer in find_experts(model):
        x, index, p = calls[layer.layer]
        rows = x.new_zeros(len(x), layer.n_experts, layer.d_inter)
        for e in range(layer.n_experts):
            w = matrices(layer.module, e)
            for t, slot in (index == e).nonzero().tolist():
                rows[t, e] = p[t, slot] * atom_activations(layer.module, x[t], w)
        features[layer.layer] = rows
    return features


def problems(
    features: torch.Tensor, down: torch.Tensor, span: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The least squares of a layer, one for each expert or one in all.

    Args:
        features: φ, (n, E, I).
        down: W_down, (E, D, I).
        span: "expert" or "layer".

    Returns:
        Features (n, F) and weights (D, F) of each.
    """
    if span == "layer":
        return [(features.flatten(1), down.movedim(0, 1).flatten(1))]
    return [(features[:, e], down[e]) for e in range(len(down))]


def all_grams(
    model: nn.Module, windows: CalibrationSet, span: str = "expert"
) -> dict[int, LayerGrams]:
    """The sums of every layer at once."""
    grams = iter_grams(model, windows, span=span)
    return {layer.layer: sums for layer, sums in grams}
