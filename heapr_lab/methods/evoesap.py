"""EvoESAP: an evolutionary search of how many experts each layer loses."""

import numpy as np

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.compression import ExpertDropping
from heapr_lab.methods.dropping import dropping
from heapr_lab.methods.evolution import (
    BUDGET,
    Rejection,
    apportioned,
    check_budget,
    evolved,
    judging_windows,
    loss,
    random_keys,
    ranked,
)
from heapr_lab.methods.expert_axes import find_expert_axes
from heapr_lab.methods.experts import dropping_of
from heapr_lab.methods.method import Method, Request

FITNESS = ("acceptance", "loss")
"""Σ min(p, q) with the dense model's predictions, or the loss on the text."""


def budget(request: Request) -> tuple[int, tuple[int, ...]]:
    """⌊ratio · E⌋ of the E experts of the model, and the most that each layer can lose.

    Raises:
        SpecError: layers cannot lose so many.
    """
    shapes = request.measured.architecture.layers.values()
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
    order: dict[int, tuple[int, ...]], numbers: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    """The experts of each layer without the first of its order, ascending."""
    pairs = zip(order.items(), numbers, strict=True)
    return {k: tuple(sorted(own[number:])) for (k, own), number in pairs}


def _evoesap(request: Request) -> ExpertDropping:
    """The numbers of experts to drop that change predictions least, of those tried.

    Raises:
        SpecError: an option is invalid, or too many experts would go.
    """
    check_budget(request)
    if request.options["fitness"] not in FITNESS:
        raise SpecError(
            f"fitness is {request.options['fitness']!r}, expected one of "
            f"{', '.join(FITNESS)}"
        )
    find_expert_axes(request.model)  # refused before any text is read
    total, most = budget(request)
    order, model = ranked(request), request.model
    if not total:
        return dropping_of(request, kept_without(order, (0,) * len(most)))
    ids = judging_windows(request)
    rejection = Rejection(model, ids)

    def cost(numbers: tuple[int, ...]) -> float:
        with dropping(model, kept_without(order, numbers)):
            acceptance = request.options["fitness"] == "acceptance"
            return rejection() if acceptance else loss(model, ids)

    sizes = np.array([len(own) for own in order.values()], dtype=float)
    numbers = evolved(
        request,
        lambda keys: apportioned(keys.tolist(), total, most),
        cost,
        random_keys(request, sizes / sizes.max()),
    )
    return dropping_of(request, kept_without(order, numbers))


EVOESAP = Method(
    "evoesap-like",
    "EvoESAP: how many experts each layer loses, by evolution; which, by REAP",
    "Liu et al. 2026, EvoESAP, arXiv:2603.06003",
    "experts",
    _evoesap,
    deviations=(
        "Built from the abstract: the expected acceptance of speculative decoding is "
        "Σ min(p, q) for each token of the text; fitness=loss takes the loss instead.",
        "The search is scipy's differential evolution over the shares of layers, which "
        "begins with equal shares, not the authors' own mutations.",
        "Candidates are judged on at most most_windows windows, chosen by a hash of "
        "their content.",
        "The order within a layer is that of REAP.",
    ),
    options={**BUDGET, "fitness": "acceptance"},
    collectors=(EXPERT_SUMS,),
)
