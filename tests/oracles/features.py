"""The features that least squares is solved in, token by token, and sums by hand."""

import torch
from families import tiny_model
from text_models import experts_calls
from torch import nn

from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.refinement.activation_grams import LayerGrams, iter_grams
from heapr_lab.text.calibration import CalibrationSet
from oracles.token_by_token import atom_activations, matrices

COUPLED = [[2.0, 1.0], [1.0, 2.0]]
"""Products of two atoms over the tokens of one part."""


@torch.no_grad()
def two_columns() -> ExpertsLayer:
    """Four experts of eight atoms, 0 but for two columns of the first: (1, 2)."""
    layer = find_experts(tiny_model("qwen2_moe"))[0]
    layer.down.zero_()
    layer.down[0, 5, :2] = torch.tensor([1.0, 2.0])
    return layer


def grams_of(*parts: list[list[float]], tokens: int = 8) -> LayerGrams:
    """Sums over the tokens of the first atoms of the first expert, 0 elsewhere.

    Args:
        *parts: those of the tokens to fit, and of those held out, if not 0.
        tokens: of each expert, half of them in each part.
    """
    sums = torch.zeros(2, 4, 8, 8, dtype=torch.float64)
    for part, block in zip(sums, parts, strict=False):
        part[0, : len(block), : len(block)] = torch.tensor(block)
    return LayerGrams("expert", sums, torch.full((2, 4), tokens // 2))


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
