"""The features that least squares is solved in, written out token by token."""

import torch
from torch import nn

from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import observed
from heapr_lab.refinement.activation_grams import LayerGrams, iter_grams
from heapr_lab.text.calibration import CalibrationSet


class Features:
    """An observer that writes out φ of every token, zeros and all: (n_tokens, E, I)."""

    def __init__(self, n_experts: int) -> None:
        self.n_experts = n_experts
        self.parts: list[torch.Tensor] = []

    def observe(
        self,
        h: torch.Tensor,
        *,
        p: torch.Tensor,
        rows: torch.Tensor,
        tokens: list[int],
    ) -> None:
        """Write out one call's features, row by row."""
        features = h.new_zeros(int(rows.max()) + 1, self.n_experts, h.shape[1])
        expert = [e for e, count in enumerate(tokens) for _ in range(count)]
        for number, (row, e) in enumerate(zip(rows.tolist(), expert, strict=True)):
            features[row, e] = p[number] * h[number]
        self.parts.append(features)


def features_of(model: nn.Module, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """φ of every token, by layer: (n_tokens, E, I)."""
    layers = find_experts(model)
    observers = [Features(layer.n_experts) for layer in layers]
    with torch.no_grad(), observed(layers, observers):
        model(ids, use_cache=False)
    return {k.layer: torch.cat(o.parts) for k, o in zip(layers, observers, strict=True)}


def all_grams(
    model: nn.Module, windows: CalibrationSet, span: str = "expert"
) -> dict[int, LayerGrams]:
    """The sums of every layer at once."""
    grams = iter_grams(model, windows, span=span)
    return {layer.layer: sums for layer, sums in grams}
