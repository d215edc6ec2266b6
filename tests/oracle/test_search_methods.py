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


# --- EvoESAP's search -------------------------------------------------------------

MOST, TOTAL, POPULATION = [4, 6, 6, 2, 6], 12, 16
OPTIONS = {"population": POPULATION, "generations": 6, "survivors": 3}
OPTIONS |= {"most_moves": 3, "largest_move": 4}


def cost(plan: Any) -> float:
    """The less, the nearer the numbers are to 2.2, in some layers above all."""
    weights = [5.0, 1.0, 3.0, 0.1, 2.0]
    return sum(w * (n - 2.2) ** 2 for w, n in zip(weights, plan, strict=True))


def test_evoesap_begins_with_shares_of_many_shapes():
    """The authors' eleven; the second plan and those after them are drawn."""
    expected = [
        [1, 1, 1, 1, 1],
        [1, 2, 3, 4, 5],
        [5, 4, 3, 2, 1],
        [1, 2, 3, 2, 1],
        [3, 2, 1, 2, 3],
        [1.0001, 0.7001, 0.4901, 0.3431, 0.2402],
        [1, 1.3, 1.69, 2.197, 2.8561],
        [2, 1, 1, 1, 1],
        [1, 1, 1, 1, 2],
        [2, 1, 2, 1, 2],
        [0.5, 0.75, 1, 0.75, 0.5],
    ]
    np.testing.assert_allclose(searches.shapes(5), expected)
    by_shares = [experts.apportioned(shares, TOTAL, MOST) for shares in expected]
    plans = searches.first_plans(MOST, TOTAL, POPULATION, random.Random(0))
    assert [plans[0], *plans[2:12]] == by_shares
    assert len(plans) == POPULATION


def test_moves_of_evoesap_are_from_layer_to_layer():
    """One move is of at most so many; no layer loses more than it can."""
    plan, options = np.array([4, 0, 6, 2, 0]), {"most_moves": 1, "largest_move": 2}
    draws = [random.Random(seed) for seed in range(99)]
    moves = [searches.moved(tuple(plan), MOST, options, draw) - plan for draw in draws]
    assert {(*np.sort(m),) for m in moves} == {(-1, 0, 0, 0, 1), (-2, 0, 0, 0, 2)}
    assert (plan + moves <= MOST).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_search_of_evoesap(seed, monkeypatch):
    """Only the best three of all so far have successors, by moves; each is judged once.

    Some are at their limits.
    """
    judge, move, made = Mock(side_effect=cost), searches.moved, []

    def moved(plan: searches.Plan, *words: Any) -> searches.Plan:
        before = [call.args[0] for call in judge.mock_calls]
        assert plan in sorted(before, key=cost)[: OPTIONS["survivors"]]
        made.append(move(plan, *words))
        return made[-1]

    monkeypatch.setattr(searches, "moved", moved)
    rng = random.Random(seed)
    winner = searches.searched(judge, MOST, TOTAL, OPTIONS, rng)
    tried = [call.args[0] for call in judge.mock_calls]
    assert len(made) == 5 * (POPULATION - OPTIONS["survivors"])
    assert len(tried) == len({*tried})
    assert {*made} <= {*tried}
    assert winner == min(tried, key=cost)
    assert all(sum(plan) == TOTAL for plan in tried)
    assert any(n == cap for plan in tried for n, cap in zip(plan, MOST, strict=True))


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
