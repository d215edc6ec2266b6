"""TENP: important experts stay whole, more of them in deeper layers; others lose atoms.

In the output y = W_down h of an expert, atom k writes h_k w_k, whose projection on y
has the length h_k · ⟨w_k, y⟩ / ‖y‖, negative where it opposes y. The scores of atoms
are its means over the tokens routed to the expert; the score of an expert is
Σ p · ‖y‖ · (1 − cos(x, y)), large where it changes the direction of its input x.

Shapes: E n_experts, I d_inter; n tokens routed to an expert.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import Collector, activations
from heapr_lab.methods.compression import AtomCompression
from heapr_lab.methods.experts import apportioned, lowest_of
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.pruning.ranking import lowest
from heapr_lab.refinement.expert_calls import ExpertCalls

_DEEPEST = 2.0
"""Whole experts of the deepest layer, for each one of the first layer."""

Scores = tuple[np.ndarray, np.ndarray]
"""The scores of a layer's experts, (E,), and of their atoms, (E, I), in float64."""


def _scores_of_layer(
    _model: nn.Module, layer: ExpertsLayer, calls: ExpertCalls
) -> Scores:
    pairs = [_scores(layer, calls, expert) for expert in range(layer.n_experts)]
    importance, projections = (torch.stack(field) for field in zip(*pairs, strict=True))
    return importance.cpu().numpy(), projections.cpu().numpy()


def _scores(
    layer: ExpertsLayer, calls: ExpertCalls, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The score of an expert, and those of its atoms (I,)."""
    down = layer.down[expert].double()
    importance, projections, n_tokens = down.new_zeros(()), down.new_zeros(()), 0
    for part in calls.batches():
        x, p = part.routed(expert)
        h = activations(layer, expert, x).double()
        y = h @ down.mT
        norms = y.norm(dim=1)
        turned = 1 - torch.cosine_similarity(x.double(), y, dim=1)
        importance = importance + (p * norms * turned).sum()
        along = h * (y @ down) / norms.clamp_min(torch.finfo(y.dtype).tiny)[:, None]
        projections, n_tokens = projections + along.sum(0), n_tokens + len(x)
    return importance, projections / max(n_tokens, 1)


PROJECTIONS = Collector("projections on outputs", _scores_of_layer)
"""`Scores` of each layer."""


def numbers_of_whole(n_experts: Mapping[int, int], share: float) -> dict[int, int]:
    """How many experts of each layer stay whole: `share` of all, more in deeper ones.

    Example:
        >>> numbers_of_whole({1: 8, 2: 8, 3: 8}, 0.5)
        {1: 3, 2: 4, 3: 5}
    """
    sizes = [*n_experts.values()]
    weights = np.linspace(1, _DEEPEST, len(sizes)) * sizes
    numbers = apportioned(weights.tolist(), int(share * sum(sizes)), sizes)
    return dict(zip(n_experts, numbers, strict=True))


def _tenp(request: Request) -> AtomCompression:
    """The atoms that stay: all of the important experts, the best of the others.

    Raises:
        SpecError: `whole` is no share.
    """
    whole, kept = request.options["whole"], 1 - request.ratio
    if not 0 <= whole < 1:
        raise SpecError(f"whole is {whole!r}, expected a share in [0, 1)")
    scores = request.measured.collected(PROJECTIONS, request.progress)
    numbers = numbers_of_whole(
        {layer: len(row) for layer, (row, _) in scores.items()}, whole * float(kept)
    )
    narrow = {
        layer: lowest(row, len(row) - numbers[layer])
        for layer, (row, _) in scores.items()
    }
    n_atoms = sum(atoms.size for _, atoms in scores.values())
    left = sum(int(mask.sum()) * scores[k][1].shape[1] for k, mask in narrow.items())
    share = request.ratio * n_atoms / left
    gone = lowest_of({k: atoms for k, (_, atoms) in scores.items()}, share, "expert")
    return request.keeping({k: ~(gone[k] & narrow[k][:, None]) for k in gone})


TENP = Method(
    "tenp-like",
    "TENP: important experts stay whole, the others lose atoms that add least",
    "He et al. 2026, TENP, arXiv:2606.09885",
    "atoms",
    _tenp,
    deviations=(
        "No code of the authors' could be obtained: built from descriptions of the "
        "paper by others.",
        "whole is the share of the kept parameters that are those of whole experts; "
        "the authors choose it for each model, 0.5 for Qwen1.5-MoE. With whole=0 it is "
        "ENP, without the trapezoid.",
        "The paper does not say how many experts stay whole in which layer: here their "
        "number rises evenly with depth, to twice as many.",
        "Scores of experts are sums over tokens, as in the paper's formula; its text "
        "has the mean.",
        "y has neither the output's bias nor the norm that some families apply to it.",
        "An expert that no calibration token reaches is not important, and loses its "
        "first atoms.",
    ),
    options={"whole": 0.5},
    collectors=(PROJECTIONS,),
)
