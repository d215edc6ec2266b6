"""EvoESAP: an evolutionary search of how many experts each layer loses.

The best plans of a generation survive. The others of the next are survivors, drawn with
replacement, in which a few experts are spared in one layer and dropped in another.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from heapr_lab.errors import SpecError, whole_number
from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.expert_axes import dropping, find_expert_axes
from heapr_lab.methods.experts import apportioned, dropping_of, ranked
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.likelihood import final_states, iter_log_probs
from heapr_lab.models.modes import evaluating

_LEAST = 5
"""Fewest candidates."""
_TOKENS_AT_ONCE = 4096
_ATTEMPTS = 32
"""Attempts to move experts, of which some would leave a layer too few."""

Plan = tuple[int, ...]
"""How many experts each layer loses."""


def check_budget(request: Request) -> None:
    """Check that there are candidates enough.

    Raises:
        SpecError: there are not.
    """
    whole_number(request.options["population"], name="population", least=_LEAST)


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


def kept_without(
    order: dict[int, tuple[int, ...]], numbers: Plan
) -> dict[int, tuple[int, ...]]:
    """The experts of each layer without the first of its order, ascending."""
    pairs = zip(order.items(), numbers, strict=True)
    return {k: tuple(sorted(experts[number:])) for (k, experts), number in pairs}


def _evoesap(request: Request) -> ExpertComposition:
    """The numbers of experts to drop that change predictions least, of those tried.

    Raises:
        SpecError: an option is invalid, or too many experts would go.
    """
    check_budget(request)
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


EVOESAP = ours("evoesap", _evoesap, EXPERT_SUMS)
