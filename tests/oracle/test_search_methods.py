"""Searches for experts against exhaustive enumeration."""

import itertools
import random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from families import tiny_model
from keeps import logits_of
from methods_by_hand import (
    CLOSE,
    FAMILIES,
    IDS,
    SIX,
    fitted,
    multiplied,
    routed,
    truncated,
    without_experts,
)
from torch import nn

from heapr_lab.methods import experts, searches
from heapr_lab.methods.expert_axes import dropping, find_expert_axes
from heapr_lab.models.experts import find_experts
from heapr_lab.refinement.expert_calls import iter_expert_calls


def rejected(model: nn.Module, small: nn.Module) -> float:
    """1 − Σ min(p, q) of a mean token, from the logits of all windows."""
    p, q = (logits_of(net, IDS)[:, :-1].softmax(-1) for net in (model, small))
    return 1 - float(torch.minimum(p, q).sum(-1).mean())


def nll(model: nn.Module) -> float:
    """The mean loss, from the logits of all windows."""
    logits = logits_of(model, IDS)[:, :-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, IDS[:, 1:].flatten()))


def reap_by_hand(model: nn.Module) -> dict[tuple[int, int], Any]:
    """Mean p · ‖f‖ by layer and expert, one token after another."""
    return {
        key: np.mean([float(t.p * t.E.norm()) for t in tokens] or [0])
        for key, tokens in routed(model).items()
    }


def by_reap(model: nn.Module) -> dict[int, list[int]]:
    """The experts of each layer, lowest mean p · ‖f‖ first."""
    means = reap_by_hand(model)
    ordered = sorted(means, key=lambda key: means[key])
    return {
        layer.layer: [e for number, e in ordered if number == layer.layer]
        for layer in find_experts(model)
    }


MUCH = {"population": 12, "generations": 12}


@pytest.mark.parametrize("family", FAMILIES)
def test_evoesap_finds_the_best_allocation(family):
    """The best of all ways in which two layers lose four experts of twelve in all."""
    model = tiny_model(family, **SIX)
    (one, first), (other, second) = by_reap(model).items()
    every = [
        {one: tuple(sorted(first[n:])), other: tuple(sorted(second[4 - n :]))}
        for n in range(5)
    ]
    best = min(every, key=lambda kept: rejected(model, without_experts(model, kept)))
    assert fitted("evoesap", model, 0.34, **MUCH).kept == best


# --- EvoESAP's search: patterns, allocation, mutation and survival by loops ---------


def patterns_by_hand(n: int, draw: random.Random) -> list[list[float]]:
    """The shares of the layers in the first twelve plans."""
    middle, quarter = (n - 1) / 2, max(1, n // 4)
    return [
        [1.0] * n,
        [draw.random() + 1e-4 for _ in range(n)],
        [i + 1.0 for i in range(n)],
        [float(n - i) for i in range(n)],
        [middle - abs(i - middle) + 1 for i in range(n)],
        [abs(i - middle) + 1 for i in range(n)],
        [0.7**i + 1e-4 for i in range(n)],
        [1.3**i for i in range(n)],
        [2.0 if i < quarter else 1.0 for i in range(n)],
        [2.0 if i >= n - quarter else 1.0 for i in range(n)],
        [2.0 if i % 2 == 0 else 1.0 for i in range(n)],
        [0.5 + 0.5 * (1 - abs(2 * i / (n - 1) - 1)) for i in range(n)],
    ]


def allocated_by_hand(shares: list[float], most: list[int], total: int) -> list[int]:
    """Whole parts, one more for the largest remainders, and then in turn."""
    wanted = [total * share / sum(shares) for share in shares]
    plan = [min(int(part), cap) for part, cap in zip(wanted, most, strict=True)]
    turns = sorted(range(len(plan)), key=lambda i: plan[i] - wanted[i])
    while sum(plan) < total:
        for i in turns:
            if sum(plan) < total and plan[i] < most[i]:
                plan[i] += 1
        turns = list(range(len(plan)))
    return plan


def mutated_by_hand(
    plan: list[int], most: list[int], draw: random.Random, largest: int, times: int
) -> list[int]:
    """Experts go from one layer to another; what does not fit is tried again."""
    plan, tries = list(plan), 0
    moves = min(draw.randint(1, times), draw.randint(1, times))
    while moves and tries < 32:
        tries += 1
        source = draw.choice([i for i, n in enumerate(plan) if n > 0])
        target = draw.choice([i for i, n in enumerate(plan) if n < most[i]])
        if source == target:
            continue
        n = draw.randint(1, largest)
        if plan[source] >= n and plan[target] + n <= most[target]:
            plan[source], plan[target] = plan[source] - n, plan[target] + n
            moves -= 1
    return plan


@pytest.mark.parametrize("seed", range(5))
def test_the_search_of_evoesap_by_hand(seed):
    """Every plan that is judged, in order, and the best; some are at their limits."""
    most, total, weights = [4, 6, 6, 2, 6], 12, [5.0, 1.0, 3.0, 0.1, 2.0]
    options = {"population": 16, "generations": 6}
    options |= {"survivors": 3, "most_moves": 3, "largest_move": 4}

    def cost(plan: Any) -> float:
        return sum(w * (n - 2.2) ** 2 for w, n in zip(weights, plan, strict=True))

    draw, judged = random.Random(seed), []
    plans = patterns_by_hand(5, draw)
    plans += [[draw.random() + 1e-4 for _ in most] for _ in range(4)]
    population = [allocated_by_hand(shares, most, total) for shares in plans]
    for _ in range(6):
        judged += population
        best = sorted(population, key=cost)[:3]
        population = best + [
            mutated_by_hand(draw.choice(best), most, draw, 4, 3) for _ in range(13)
        ]
    judge = Mock(side_effect=cost)
    winner = searches.searched(judge, most, total, options, random.Random(seed))
    tried = [call.args[0] for call in judge.mock_calls]
    assert tried == list(dict.fromkeys(map(tuple, judged)))
    assert winner == min(tried, key=cost)
    assert all(sum(plan) == total for plan in tried)
    assert any(n == cap for plan in tried for n, cap in zip(plan, most, strict=True))


def test_the_fitness_of_a_search_is_that_of_all_logits():
    """The loss and the rejection, of the dense model and of a smaller one."""
    model = tiny_model("qwen2_moe", **SIX)
    rejection, kept = searches.Rejection(model, IDS), {0: (0, 2, 3), 1: (1, 4)}
    assert rejection() == pytest.approx(0, abs=1e-12)
    small = without_experts(model, kept)
    with dropping(model, kept):
        rate, loss = rejection(), searches.loss(model, IDS)
    assert rate == pytest.approx(rejected(model, small), rel=1e-9)
    assert rate > 1e-3
    assert loss == pytest.approx(nll(small), rel=1e-9)


def test_shares_are_exact_and_limited():
    """Equal weights give equal shares, and every allocation can be reached."""
    assert experts.apportioned([0.0, 0.0], 3, [1, 4]) == (1, 2)
    for wanted in itertools.product(range(4), repeat=3):
        plan = experts.apportioned(list(map(float, wanted)), sum(wanted), [3, 3, 3])
        assert plan == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_moe_i2_searches_the_best_set_and_truncates(family):
    """Each layer's set is the exhaustive optimum of NAEE's loss; matrices by SVD.

    What is left of them are the largest singular values times REAP's score.
    """
    model = tiny_model(family, **SIX)
    fit = fitted("moe-i2-like", model, 0.5, **MUCH)
    assert sum(6 - len(experts) for experts in fit.kept.values()) == 3
    axes = {axis.layer.layer: axis for axis in find_expert_axes(model)}
    scores = reap_by_hand(model)
    for calls in iter_expert_calls(model, IDS):
        layer = calls.layer
        kept = fit.kept[layer.layer]
        with torch.no_grad():
            cost = experts.LayerLoss(axes[layer.layer], calls)
            assert kept == min(itertools.combinations(range(6), len(kept)), key=cost)
        chosen, left_out = [], []
        for expert, made in zip(kept, fit.compositions[layer.layer], strict=True):
            for name in ("gate", "up", "down"):
                rank = made[f"{name}_left"].shape[1]
                assert 1 <= rank <= 5  # 5 · (8 + 16) < 8 · 16
                dense = layer.expert(expert)[name]
                values = scores[layer.layer, expert] * torch.linalg.svdvals(dense)
                chosen += values[1:rank].tolist()
                left_out += values[rank:5].tolist()
                expected = truncated(dense, rank)
                torch.testing.assert_close(multiplied(made, name), expected, **CLOSE)
        assert min(chosen) > max(left_out)
    assert 0 <= fit.achieved_ratio - 0.5 <= 2 * 24 / (12 * 3 * 8 * 16)
    assert fit.savings(model).routed_flops[1] < fit.savings(model).routed_flops[0]


def test_moe_i2_spares_the_layer_that_matters():
    """A layer without effect on the loss loses more experts than the other."""
    model = tiny_model("mixtral", **SIX)
    with torch.no_grad():
        find_experts(model)[0].down.mul_(1e-3)
        find_experts(model)[1].down.mul_(10)
    compression = fitted("moe-i2-like", model, 0.5)
    assert len(compression.kept[0]) < len(compression.kept[1])
