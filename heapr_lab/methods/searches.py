"""Methods that search for the experts to drop: EvoESAP and MoE-I².

EvoESAP searches how many experts each layer loses. The best plans of a generation
survive. The others of the next are survivors, drawn with replacement, in which a few
experts are spared in one layer and dropped in another.

Half of what MoE-I² removes are experts: layers whose experts matter less lose more of
them, and which, a search in each layer decides. The other half are singular values of
the experts that are left.

Shapes: D d_expert, I d_inter; a unit is one singular value, of D + I parameters.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from scipy.optimize import differential_evolution
from torch import nn

from heapr_lab.errors import SpecError, whole_number
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.methods.collectors import expert_sums
from heapr_lab.methods.composing import Composition
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.expert_axes import dropping, find_expert_axes
from heapr_lab.methods.experts import (
    LayerLoss,
    Subset,
    apportioned,
    by_layer,
    dropping_of,
    kept_of_layers,
    ranked,
    reap_scores,
)
from heapr_lab.methods.low_rank import put_factors
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.grouped_linear import accumulating_dtype
from heapr_lab.models.likelihood import final_states, iter_log_probs
from heapr_lab.models.modes import evaluating

_LEAST = 5
"""Fewest candidates."""
_TOKENS_AT_ONCE = 4096
_ATTEMPTS = 32
"""Attempts to move experts, of which some would leave a layer too few."""
_BY_DROPPING = Fraction(1, 2)
"""Share of the ratio that MoE-I² removes as whole experts."""

Plan = tuple[int, ...]
"""How many experts each layer loses."""
Order = Mapping[int, tuple[int, ...]]
"""The experts of each layer, from the lowest REAP score."""


def judging_windows(request: Request) -> torch.Tensor:
    """At most `most_windows` of the windows, the same in whatever order they come."""
    prints = request.calibration.window_fingerprints()
    order = sorted(range(len(prints)), key=prints.__getitem__)
    return request.calibration.ids[order[: request.options["most_windows"]]]


def at_once(ids: torch.Tensor) -> int:
    """Windows in a batch."""
    return max(1, _TOKENS_AT_ONCE // ids.shape[1])


class Rejection:
    """1 − Σ min(p, q) for a mean token: p of the dense model, q of the current one.

    So often a draft of the smaller model would be rejected in speculative decoding.
    """

    def __init__(self, model: nn.Module, ids: torch.Tensor) -> None:
        """Run the dense model; only its final states (tokens, d_model) are kept."""
        self._model, self._ids = model, ids
        self._dense = self._states()

    def _states(self) -> list[torch.Tensor]:
        with evaluating(self._model):
            return [
                final_states(self._model, part)[:, :-1]
                for part in self._ids.split(at_once(self._ids))
            ]

    def __call__(self) -> float:
        """The share for the current model, which must have the dense model's head."""
        accepted = 0.0
        with evaluating(self._model):
            for dense, states in zip(self._dense, self._states(), strict=True):
                for log_p, log_q in zip(
                    iter_log_probs(self._model, dense),
                    iter_log_probs(self._model, states),
                    strict=True,
                ):
                    accepted += float(torch.minimum(log_p, log_q).double().exp().sum())
        return 1 - accepted / self._ids[:, 1:].numel()


def budget(request: Request) -> tuple[int, tuple[int, ...]]:
    """⌊ratio · E⌋ of the E experts of the model, and the most that each layer can lose.

    Raises:
        SpecError: layers cannot lose so many.
    """
    shapes = request.shapes.values()
    n_experts = sum(shape.n_experts for shape in shapes)
    most = tuple(shape.n_experts - shape.top_k for shape in shapes)
    total = int(request.ratio * n_experts)
    if total > sum(most):
        raise SpecError(
            f"ratio {float(request.ratio):g} would drop {total} of {n_experts} "
            f"experts, but tokens are routed to {n_experts - sum(most)} of them; the "
            f"largest possible ratio is {int(sum(most) / n_experts * 10**6) / 10**6:g}"
        )
    return total, most


def kept_without(order: Order, numbers: Plan) -> dict[int, tuple[int, ...]]:
    """The experts of each layer without the first of its order, ascending."""
    pairs = zip(order.items(), numbers, strict=True)
    return {k: tuple(sorted(experts[number:])) for (k, experts), number in pairs}


def _evoesap(request: Request) -> ExpertComposition:
    """The numbers of experts to drop that change predictions least, of those tried.

    Raises:
        SpecError: an option is invalid, or too many experts would go.
    """
    whole_number(request.options["population"], name="population", least=_LEAST)
    find_expert_axes(request.model)  # refused before any text is read
    total, most = budget(request)
    order, model = ranked(request), request.model
    if not total:
        return dropping_of(request, kept_without(order, (0,) * len(most)))
    rejection = Rejection(model, judging_windows(request))

    def cost(plan: Plan) -> float:
        with dropping(model, kept_without(order, plan)):
            return rejection()

    rng = random.Random(request.seed)
    plan = searched(cost, most, total, request.options, rng)
    return dropping_of(request, kept_without(order, plan))


def searched(
    cost: Callable[[Plan], float],
    most: Sequence[int],
    total: int,
    options: Mapping[str, Any],
    rng: random.Random,
) -> Plan:
    """The plan of the least cost that is found.

    Args:
        cost: called once for each plan.
        most: how many experts each layer can lose.
        total: how many all lose together.
        options: those of the method.
        rng: draws the plans.
    """
    remembered = functools.cache(cost)
    plans = first_plans(most, total, options["population"], rng)
    best = sorted(plans, key=remembered)[: options["survivors"]]
    for _ in range(options["generations"] - 1):
        number = max(0, options["population"] - len(best))
        plans = [moved(rng.choice(best), most, options, rng) for _ in range(number)]
        best = sorted([*best, *plans], key=remembered)[: options["survivors"]]
    return best[0]


def first_plans(
    most: Sequence[int], total: int, number: int, rng: random.Random
) -> list[Plan]:
    """Plans by shares of many shapes, such as rising with depth, and by drawn ones."""

    def drawn() -> np.ndarray:
        return np.array([rng.random() + 1e-4 for _ in most])

    even, *others = shapes(len(most))
    shares = [even, drawn(), *others]
    shares += [drawn() for _ in range(number - len(shares))]
    return [apportioned(share.tolist(), total, most) for share in shares[:number]]


def shapes(n_layers: int) -> list[np.ndarray]:
    """The shares of the authors' first plans, (n_layers,) each.

    Even, rising, falling, largest or least in the middle, falling or rising fast, twice
    as large in the first or the last quarter or in every other layer, and half as large
    at both ends.
    """
    place, quarter = np.arange(n_layers), max(1, n_layers // 4)
    aside = np.abs(place - (n_layers - 1) / 2)
    ends = np.abs(2 * place / max(n_layers - 1, 1) - 1)
    return [
        np.ones(n_layers),
        place + 1.0,
        n_layers - place.astype(float),
        aside.max() + 1 - aside,
        aside + 1,
        0.7**place + 1e-4,
        1.3**place,
        1.0 + (place < quarter),
        1.0 + (place >= n_layers - quarter),
        1.0 + (place % 2 == 0),
        1 - ends / 2,
    ]


def moved(
    plan: Plan, most: Sequence[int], options: Mapping[str, Any], rng: random.Random
) -> Plan:
    """The plan after some experts are spared in a layer, and as many lost in another.

    Args:
        plan: how many each layer loses.
        most: how many each can lose.
        options: `most_moves` and `largest_move`.
        rng: draws how often and how many, and the layers.
    """
    new, times = list(plan), options["most_moves"]
    left = min(rng.randint(1, times), rng.randint(1, times))
    for _ in range(_ATTEMPTS):
        sources = [k for k, lost in enumerate(new) if lost]
        targets = [k for k, lost in enumerate(new) if lost < most[k]]
        if not (left and sources and targets):
            break
        source, target = rng.choice(sources), rng.choice(targets)
        if source == target and len(targets) > 1:
            continue
        number = rng.randint(1, options["largest_move"])
        if number <= new[source] and new[target] + number <= most[target]:
            new[source] -= number
            new[target] += number
            left -= 1
    return tuple(new)


ours("evoesap", _evoesap, expert_sums)


# --- MoE-I² -----------------------------------------------------------------------


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


# --- MoE-I²: low rank -------------------------------------------------------------


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
    whole_number(request.options["population"], name="population", least=_LEAST)
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


ours("moe-i2-like", _moe_i2, expert_sums)
