"""Evolutionary search by scipy's differential evolution, and what searches judge by.

A candidate, such as a set of experts, is decoded from a vector of keys in [0, 1]. Each
candidate is judged once. Experts are in the order of their REAP scores, and windows in
that of their contents, so that neither order of the input matters.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import torch
from scipy.optimize import differential_evolution
from torch import nn

from heapr_lab.errors import whole_number
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.methods.experts import reap_scores
from heapr_lab.methods.method import Request
from heapr_lab.models.likelihood import final_states, iter_log_probs
from heapr_lab.models.modes import evaluating

BUDGET = {"population": 8, "generations": 4, "most_windows": 8}
"""Options of a search: candidates at a time, rounds, and windows to judge them on."""
_LEAST = 5
"""Fewest candidates of scipy's differential evolution."""
_TOKENS_AT_ONCE = 4096

Candidate = TypeVar("Candidate", bound=Hashable)


def check_budget(request: Request) -> None:
    """Check that there are candidates enough.

    Raises:
        SpecError: there are not.
    """
    whole_number(request.options["population"], name="population", least=_LEAST)


def evolved(
    request: Request,
    decode: Callable[[np.ndarray], Candidate],
    cost: Callable[[Candidate], float],
    starts: np.ndarray,
) -> Candidate:
    """The candidate of the least cost that is found from `starts`, at least as good.

    Args:
        request: with the seed and the number of generations.
        decode: from keys (N,) to what they stand for.
        cost: called once for each candidate.
        starts: keys of the first candidates, (population, N), each in [0, 1].
    """
    remembered = functools.cache(cost)
    optimum = differential_evolution(
        lambda keys: remembered(decode(keys)),
        [(0.0, 1.0)] * starts.shape[1],
        init=starts,
        maxiter=request.options["generations"],
        polish=False,
        tol=0.0,
        rng=request.seed,
    )
    return decode(optimum.x)


def random_keys(request: Request, first: np.ndarray) -> np.ndarray:
    """The keys `first` (N,), and others drawn evenly, (population, N)."""
    rng = np.random.default_rng(request.seed)
    others = rng.random((request.options["population"] - 1, len(first)))
    return np.concatenate([first[None], others])


def ranked(request: Request) -> dict[int, tuple[int, ...]]:
    """The experts of each layer from the lowest REAP score to the highest."""
    frame = request.measured.experts(request.progress)
    scores, layers = reap_scores(frame), frame["layer"].to_numpy()
    return {
        k: tuple(np.argsort(scores[layers == k], kind="stable").tolist())
        for k in request.measured.architecture.layers
    }


def judging_windows(request: Request) -> torch.Tensor:
    """At most `most_windows` of the windows, the same in whatever order they come."""
    prints = request.calibration.window_fingerprints()
    order = sorted(range(len(prints)), key=prints.__getitem__)
    return request.calibration.ids[order[: request.options["most_windows"]]]


def _at_once(ids: torch.Tensor) -> int:
    """Windows in a batch."""
    return max(1, _TOKENS_AT_ONCE // ids.shape[1])


def loss(model: nn.Module, ids: torch.Tensor) -> float:
    """The mean loss of each predicted token, in nats."""
    return evaluate_perplexity(model, ids, batch_size=_at_once(ids)).nll


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
                for part in self._ids.split(_at_once(self._ids))
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


def apportioned(
    weights: Sequence[float], total: int, most: Sequence[int]
) -> tuple[int, ...]:
    """`total` units, shared in proportion to `weights` by the largest remainders.

    Each share is at most that of `most`, whose sum is at least `total`.

    Example:
        >>> apportioned([1.0, 2.0, 1.0], 5, [4, 2, 4])
        (2, 2, 1)
    """
    shares = total * (np.asarray(weights, dtype=float) / (sum(weights) or 1.0))
    units = np.minimum(shares.astype(int), most)
    order = np.argsort(units - shares, kind="stable")
    for place in itertools.chain(order, itertools.cycle(range(len(units)))):
        if units.sum() == total:
            break
        units[place] += units[place] < most[place]
    return tuple(units.tolist())
