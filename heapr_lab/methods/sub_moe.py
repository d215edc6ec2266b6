"""Sub-MoE: k-means by the cosines of experts' outputs, then a weighted mean.

Sub-MoE factors the matrices of a group side by side, [W₁ … Wₙ] = U Σ [V₁ … Vₙ], and
takes W = U Σ · Σᵢ fᵢ Vᵢ with the experts' frequencies fᵢ. With all singular values that
is Σᵢ fᵢ · U Σ Vᵢ = Σᵢ fᵢ Wᵢ, the weighted mean, which is what is computed here.

Shapes: E n_experts, n tokens, D d_expert.
"""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import normalize

from heapr_lab.methods.collectors import EXPERT_SUMS, Collector, expert_output
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.merging import (
    Groups,
    groups_of,
    merged_by_frequency,
    n_groups,
    ranked,
)
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.refinement.expert_calls import ExpertCalls

_MOST_ROUNDS = 100
_TOKENS_AT_ONCE = 512


def _output_cosines(
    _model: nn.Module, layer: ExpertsLayer, calls: ExpertCalls
) -> np.ndarray:
    total = torch.zeros(layer.n_experts, layer.n_experts, dtype=torch.float64)
    for x in calls.hidden_states.split(_TOKENS_AT_ONCE):
        outputs = [expert_output(layer, e, x) for e in range(layer.n_experts)]
        wide = torch.promote_types(x.dtype, torch.float32)
        units = normalize(torch.stack(outputs).to(wide), dim=2).flatten(1)  # (E, n D)
        total += (units @ units.T).double().cpu()
    cosines: np.ndarray = total.numpy() / len(calls.hidden_states)
    return cosines


OUTPUT_COSINES = Collector("cosines of outputs on all tokens", _output_cosines)
"""The cosine of the outputs of each two experts of a layer for a token, its mean over
all tokens of the layer, (E, E)."""


def _sub_moe(request: Request) -> ExpertComposition:
    """Each layer's experts are grouped by the cosines of their outputs."""
    cosines = request.measured.collected(OUTPUT_COSINES, request.progress)
    rng, groups = np.random.default_rng(request.seed), {}
    order = ranked(request).groupby("layer")["expert"].agg(list)
    for layer, shape in request.shapes.items():
        experts = order[layer]  # so that the numbers of experts do not matter
        near = cosines[layer][np.ix_(experts, experts)]
        clusters = k_means(near, n_groups(shape, request.ratio), rng)
        labels = {experts[e]: i for i, group in enumerate(clusters) for e in group}
        groups[layer] = groups_of([labels[e] for e in range(shape.n_experts)])
    return merged_by_frequency(request, groups)


def k_means(cosines: np.ndarray, number: int, rng: np.random.Generator) -> Groups:
    """`number` groups of vectors of length 1 with these inner products (E, E).

    Begins with k-means++, and ends when nothing moves or a group would become empty.

    Example:
        >>> rows = np.array([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0], [1.0, 0.1]])
        >>> rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        >>> k_means(rows @ rows.T, 2, np.random.default_rng(0))
        [[0, 3], [1, 2]]
    """
    first = seeds(cosines, number, rng)
    labels = cosines[:, first].argmax(1)
    labels[first] = np.arange(number)
    for _ in range(_MOST_ROUNDS):
        members = np.eye(number)[labels] / np.bincount(labels)
        to_means = cosines @ members  # (E, number)
        squares = (members * to_means).sum(0)
        moved = (squares - 2 * to_means).argmin(1)
        if len(set(moved.tolist())) < number or (moved == labels).all():
            break
        labels = moved
    return groups_of(labels.tolist())


def seeds(cosines: np.ndarray, number: int, rng: np.random.Generator) -> list[int]:
    """The first centres of k-means++: each drawn by its squared distance to those."""
    centres = [int(rng.integers(len(cosines)))]
    while len(centres) < number:
        far = np.maximum(1 - cosines[:, centres].max(1), 0)
        far[centres] = 0
        if not far.any():
            far = np.isin(np.arange(len(far)), centres, invert=True).astype(float)
        centres.append(int(rng.choice(len(far), p=far / far.sum())))
    return centres


SUB_MOE = ours("sub-moe-like", _sub_moe, OUTPUT_COSINES, EXPERT_SUMS)
