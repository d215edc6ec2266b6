"""MoE-I²: experts are dropped unevenly, and those that are left become low rank.

Half of what is to be removed are experts: layers whose experts matter less lose more of
them, and which, a search in each layer decides. The other half are singular values of
the experts that are left.

Shapes: D d_expert, I d_inter; a unit is one singular value, of D + I parameters.
"""

import functools
from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np
import torch
from scipy.optimize import differential_evolution
from torch import nn

from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.composed_experts import Composition
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.evoesap import at_once, check_budget, judging_windows
from heapr_lab.methods.expert_axes import dropping, find_expert_axes
from heapr_lab.methods.experts import apportioned, by_layer, ranked, reap_scores
from heapr_lab.methods.low_rank import put_factors
from heapr_lab.methods.method import Request, ours
from heapr_lab.methods.naee import LayerLoss, Subset, kept_of_layers
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.grouped_linear import accumulating_dtype

_BY_DROPPING = Fraction(1, 2)
"""Share of the ratio that is removed as whole experts."""

Order = Mapping[int, tuple[int, ...]]
"""The experts of each layer, from the lowest REAP score."""


def loss(model: nn.Module, ids: torch.Tensor) -> float:
    """The mean loss of each predicted token, in nats."""
    return evaluate_perplexity(model, ids, batch_size=at_once(ids)).nll


def rises(request: Request, order: Order, ids: torch.Tensor) -> np.ndarray:
    """How much the loss rises when one layer loses half of what it may, (layers,)."""
    shapes, model = request.shapes, request.model
    dense, rise = loss(model, ids), []
    for layer, experts in order.items():
        spare = shapes[layer].n_experts - shapes[layer].top_k
        kept = {k: tuple(range(s.n_experts)) for k, s in shapes.items()}
        kept[layer] = tuple(sorted(experts[(spare + 1) // 2 :]))
        with dropping(model, kept):
            rise.append(max(loss(model, ids) - dense, 0.0))
    return np.array(rise)


def _numbers(request: Request, order: Order) -> dict[int, int]:
    """How many experts each layer loses: the more, the less the loss rises."""
    shapes = request.shapes
    total = int(request.ratio * _BY_DROPPING * sum(map(len, order.values())))
    if not total:
        return dict.fromkeys(order, 0)
    rise = rises(request, order, judging_windows(request))
    weights = 1 / (1 + rise / max(float(rise.mean()), 1e-12))
    most = [s.n_experts - s.top_k for s in shapes.values()]
    total = min(total, sum(most))
    return dict(zip(order, apportioned(weights.tolist(), total, most), strict=True))


def best_of_layer(
    request: Request,
    order: tuple[int, ...],
    n_gone: int,
    cost: Callable[[Subset], float],
) -> Subset:
    """The experts that a layer keeps: the best of the sets that evolution tried.

    A set is decoded from a key in [0, 1] of each expert. Each is judged once. The first
    keys are those of the order, the others of the first generation are drawn evenly.
    """
    remembered, n_experts = functools.cache(cost), len(order)

    def decode(keys: np.ndarray) -> Subset:
        places = np.argsort(keys, kind="stable")[n_gone:]
        return tuple(sorted(order[place] for place in places))

    rng = np.random.default_rng(request.seed)
    others = rng.random((request.options["population"] - 1, n_experts))
    optimum = differential_evolution(
        lambda keys: remembered(decode(keys)),
        [(0.0, 1.0)] * n_experts,
        init=np.concatenate([np.linspace(0, 1, n_experts)[None], others]),
        maxiter=request.options["generations"],
        polish=False,
        tol=0.0,
        rng=request.seed,
    )
    return decode(optimum.x)


def _kept(request: Request, order: Order) -> dict[int, Subset]:
    """The experts that each layer keeps, by the change of its output."""
    numbers = _numbers(request, order)

    def choose(k: int, loss: LayerLoss) -> Subset:
        return best_of_layer(request, order[k], numbers[k], loss)

    return kept_of_layers(request, numbers, choose)


# --- low rank ---------------------------------------------------------------------


def ranks(values: list[np.ndarray], units: int, most: int) -> list[int]:
    """How many of each list of values are kept: the `units` largest of all.

    At least one and at most `most` of each, as far as units go.

    Example:
        >>> ranks([np.array([9.0, 1.0]), np.array([5.0, 4.0])], 3, 2)
        [1, 2]
    """
    order = sorted(
        (place > 0, -float(value), number)
        for number, row in enumerate(values)
        for place, value in enumerate(row[:most])
    )
    chosen = [number for _, _, number in order[:units]]
    return [chosen.count(number) for number in range(len(values))]


def low_rank(
    layer: ExpertsLayer, kept: Subset, importance: np.ndarray, units: int
) -> Composition:
    """The kept experts, each matrix the nearest of its rank.

    Args:
        layer: the dense layer.
        kept: its experts that are left.
        importance: how much each expert matters, (E,), a factor of its singular values.
        units: singular values that are left in all.
    """
    experts = {e: layer.expert(e) for e in kept}
    most = (layer.d_expert * layer.d_inter - 1) // (layer.d_expert + layer.d_inter)
    factors = {
        (name, e): _svd(matrix)
        for e, expert in experts.items()
        for name, matrix in expert.items()
        if matrix.dim() == 2
    }
    values = [s.cpu().numpy() * importance[e] for (_, e), (_, s, _) in factors.items()]
    rank = zip(factors.items(), ranks(values, units, most), strict=True)
    for ((name, e), (u, s, v)), r in rank:
        put_factors([experts[e]], name, [u[:, :r] * s[:r]], [v[:r]])
    return [*experts.values()]


def _svd(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """U, the singular values, and Vᵀ, in at least float32."""
    wide = matrix.to(accumulating_dtype(matrix))
    return tuple(torch.linalg.svd(wide, full_matrices=False))


def _units(request: Request, kept: Mapping[int, Subset]) -> dict[int, int]:
    """The singular values that each layer may keep, in proportion to its experts."""
    shapes = request.shapes
    sizes = {k: s.d_inter * s.atom_parameters for k, s in shapes.items()}
    left = {k: len(kept[k]) * size for k, size in sizes.items()}
    dense = sum(s.n_experts * sizes[k] for k, s in shapes.items())
    share = (1 - request.ratio) * dense / sum(left.values())
    biases = {k: len(kept[k]) * s.d_inter * s.atom_biases for k, s in shapes.items()}
    return {
        k: max(0, int((share * left[k] - biases[k]) / (s.d_expert + s.d_inter)))
        for k, s in shapes.items()
    }


def _moe_i2(request: Request) -> ExpertComposition:
    """Uneven dropping, then low rank.

    Raises:
        SpecError: an option is invalid.
    """
    check_budget(request)
    find_expert_axes(request.model)  # refused before any text is read
    if not request.ratio:
        return request.composed({})
    frame = request.measured.experts(request.progress)
    scores = by_layer(frame, reap_scores(frame))
    kept = _kept(request, ranked(request))
    units = _units(request, kept)
    compositions = {
        k: low_rank(layer, kept[k], scores[k], units[k])
        for layer in find_experts(request.model)
        for k in (layer.layer,)
    }
    return request.composed(compositions, kept)


MOE_I2 = ours("moe-i2-like", _moe_i2, EXPERT_SUMS)
