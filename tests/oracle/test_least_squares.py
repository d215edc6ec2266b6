"""Compensation is least squares over the routed activations, and never does harm.

Elimination is greedy least squares: what goes is made up for by what stays.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_model, tiny_windows
from keeps import widths_keep
from oracles.features import all_grams, features_of, problems

from heapr_lab import ImportanceTable, KeepMask, collect_statistics, select
from heapr_lab.errors import CoverageError
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.refinement import elimination
from heapr_lab.refinement.activation_grams import SPANS
from heapr_lab.refinement.compensation import RIDGES, Compensation, fit_compensation
from heapr_lab.refinement.elimination import eliminate, layer_costs

FAMILIES = ("qwen2_moe", "gpt_oss", "nemotron_h", "deepseek_v2")
WINDOWS = tiny_windows(n_sequences=8, seq_len=24)
HELD = torch.tensor([False, True, False, False] * 2)
"""Which of the windows are held out: the second of every four."""


# --- its sums -------------------------------------------------------------------


def test_a_layer_takes_part_once_in_every_forward():
    """One that is skipped, or runs twice, would leave sums of other tokens."""
    model = tiny_model("qwen2_moe")
    mlp = model.model.layers[1].mlp
    once = mlp.forward
    for forward, seen in ((lambda x: x, 0), (lambda x: once(once(x)), 4)):
        mlp.forward = forward
        text = f"layer 1 took part in {seen} of 2 forwards, expected all"
        with pytest.raises(CoverageError, match=text):
            all_grams(model, WINDOWS)


# --- the solution -----------------------------------------------------------------


def least_squares(
    features: torch.Tensor, W: torch.Tensor, kept: torch.Tensor, ridge: float
) -> torch.Tensor:
    """The same by QR of the features, with the ridge as rows of their own.

    Shapes: features (n, F); W (D, F); kept (F,); result (D, F).
    """
    free = features[:, kept]
    pull = (ridge * free.square().sum(0)).sqrt().diag()
    goal = torch.cat([features @ W.T, pull @ W[:, kept].T])
    weights = torch.linalg.lstsq(torch.cat([free, pull]), goal, driver="gelsd").solution
    new = torch.zeros_like(W)
    new[:, kept] = weights.T
    return new


@pytest.mark.parametrize("ridge", [1e-4, 1e-1])
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_are_the_least_squares(family, span, ridge):
    """They equal a QR of the features themselves, for every orientation of weights."""
    model = tiny_model(family)
    keep = widths_keep(model, 5, structure="ragged")
    compensation = fit_compensation(model, keep, WINDOWS, ridge=ridge, span=span)
    features = features_of(model, WINDOWS.ids)
    near = 1e-4 if family == "nemotron_h" else 1e-6  # it adds up in float32
    for layer in find_experts(model):
        for inputs, W, kept, new in solved(layer, keep, features, compensation):
            expected = least_squares(inputs, W, kept, ridge)
            torch.testing.assert_close(new, expected, rtol=near, atol=1e-9)


def solved(
    layer: ExpertsLayer,
    keep: KeepMask,
    features: dict[int, torch.Tensor],
    compensation: Compensation,
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Features, weights, what of them is kept, and new weights of each problem."""
    span = compensation.settings["span"]
    new = compensation.down_projs[layer.layer]
    inputs = features[layer.layer]
    dense, fitted = (problems(inputs, W, span) for W in (layer.down.detach(), new))
    masks = torch.from_numpy(keep.by_layer(layer.layer).reshape(len(dense), -1).copy())
    for (x, W), (_, W_new), kept in zip(dense, fitted, masks, strict=True):
        yield x, W, kept, W_new


def test_the_ridge_is_the_one_that_errs_least_on_held_out_tokens():
    """It is fitted on the other windows, by the features themselves."""
    model = tiny_model("qwen2_moe")
    keep = widths_keep(model, 4, structure="ragged")
    compensation = fit_compensation(model, keep, WINDOWS, span="layer")
    fitted = features_of(model, WINDOWS.ids[~HELD])
    tested = features_of(model, WINDOWS.ids[HELD])
    for layer in find_experts(model):
        ((inputs, W, kept, _),) = solved(layer, keep, fitted, compensation)
        others, errors = tested[layer.layer].flatten(1), {}
        for ridge in RIDGES:
            change = others @ (least_squares(inputs, W, kept, ridge) - W).T
            errors[ridge] = float(change.square().sum())
        row = compensation.report.set_index("layer").loc[layer.layer]
        assert row["ridge"] == min(errors, key=errors.__getitem__)
        size = (others @ W.T).square().sum()
        gone = (others @ (W * ~kept).T).square().sum()
        least = min(*errors.values(), float(gone))  # else the weights stay
        assert row["compensated"] == pytest.approx(least / float(size))


# --- elimination ------------------------------------------------------------------

RIDGE = 0.05


def greedy(
    features: torch.Tensor, W: torch.Tensor, rate: torch.Tensor
) -> list[tuple[int, float]]:
    """Atoms in the order in which they go, with costs, by least squares for each set.

    Shapes: features (n, F); W (D, F); rate (F,).
    """
    size = features.shape[1]
    pull = (RIDGE * features.square().sum(0)).sqrt().diag()
    rows = torch.cat([features, pull])
    goal = rows @ W.T

    def error(stay: list[int]) -> float:
        if not stay:
            return float(goal.square().sum())
        weights = torch.linalg.lstsq(rows[:, stay], goal, driver="gelsd").solution
        return float((rows[:, stay] @ weights - goal).square().sum())

    left, now, level, order = list(range(size)), 0.0, 0.0, []
    while left:
        errors = {k: error([other for other in left if other != k]) for k in left}
        k = min(left, key=lambda k: (errors[k] - now) * float(rate[k]))
        level = max(level, (errors[k] - now) * float(rate[k]))
        order.append((k, level))
        now = errors[k]
        left.remove(k)
    return order


@pytest.fixture(scope="module", params=["qwen2_moe", "gpt_oss"])
def measured(request) -> tuple[Any, ImportanceTable]:
    """A tiny model and its statistics."""
    model = tiny_model(request.param)
    return model, collect_statistics(model, WINDOWS)


@pytest.mark.parametrize("span", ["expert", "layer"])
def test_one_by_one_it_is_greedy_least_squares(measured, span):
    """Costs in order, and which atom has which, against every set solved by itself."""
    model, table = measured
    layer = find_experts(model)[0]
    grams = all_grams(model, WINDOWS, span=span)[layer.layer]
    rows = table.frame["layer"].eq(layer.layer).to_numpy()
    base = torch.from_numpy(table.score("fisher").to_numpy()[rows])
    base = base.view(layer.n_experts, layer.d_inter)
    costs = layer_costs(layer, grams, base, ridge=RIDGE, n_steps=10**6).numpy()
    features = features_of(model, WINDOWS.ids)[layer.layer]
    # Loss for each unit of an expert's squared error.
    energy = features.square().sum(0) * layer.down.detach().square().sum(1)  # (E, I)
    rate = base.sum(1) / energy.sum(1).clamp_min(1e-300)
    each = problems(features, layer.down.detach(), span)
    rate = rate.repeat_interleave(layer.d_inter).view(len(each), -1)
    for expected_of, speed, cost in zip(
        each, rate, costs.reshape(len(each), -1), strict=True
    ):
        if not expected_of[0].any():
            assert not cost.any()
            continue
        for atom, expected in greedy(*expected_of, speed):
            np.testing.assert_allclose(cost[atom], expected, rtol=1e-6, atol=1e-14)


def test_together_is_nearly_one_by_one(measured, monkeypatch):
    """A few at a time: another order, yet as little error after compensation."""
    model, table = measured
    errors = []
    for n_steps in (8, 10**6):
        costs = functools.partial(layer_costs, n_steps=n_steps)
        monkeypatch.setattr(elimination, "layer_costs", costs)
        scored = eliminate(model, table, WINDOWS)
        keep = select(scored, ratio=0.5, estimator="elimination")
        report = fit_compensation(model, keep, WINDOWS, ridge=1e-3).report
        errors.append(report["compensated"].sum())
    assert errors[0] <= 1.5 * errors[1]
