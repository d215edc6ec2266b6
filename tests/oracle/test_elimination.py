"""Elimination is greedy least squares: what goes is made up for by what stays."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_ids, tiny_model
from oracles.features import all_grams, features_of

from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.pruning.selection import select
from heapr_lab.refinement import elimination
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.refinement.elimination import eliminate, layer_costs
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=8, seq_len=24))
RIDGE = 0.05
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-14}


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


def rates(table: ImportanceTable, layer: ExpertsLayer, features: torch.Tensor) -> Any:
    """Loss for each unit of an expert's squared error, (E,)."""
    rows = table.frame["layer"].eq(layer.layer).to_numpy()
    score = torch.from_numpy(table.score("fisher").to_numpy()[rows])
    energy = features.square().sum(0) * layer.down.detach().square().sum(1)  # (E, I)
    return score.view_as(energy).sum(1) / energy.sum(1).clamp_min(1e-300)


@pytest.fixture(scope="module", params=["qwen2_moe", "gpt_oss"])
def measured(request: pytest.FixtureRequest) -> tuple[Any, ImportanceTable]:
    """A tiny model and its statistics."""
    model = tiny_model(request.param)
    return model, collect_statistics(model, WINDOWS)


@pytest.mark.parametrize("span", ["expert", "layer"])
def test_one_by_one_it_is_greedy_least_squares(
    measured: tuple[Any, ImportanceTable], span: str
) -> None:
    """Costs in order, and which atom has which, against every set solved by itself."""
    model, table = measured
    layer = find_experts(model)[0]
    grams = all_grams(model, WINDOWS, span=span)[layer.layer]
    rows = table.frame["layer"].eq(layer.layer).to_numpy()
    base = torch.from_numpy(table.score("fisher").to_numpy()[rows])
    base = base.view(layer.n_experts, layer.d_inter)
    costs = layer_costs(layer, grams, base, ridge=RIDGE, n_steps=10**6).numpy()
    features = features_of(model, WINDOWS.ids)[layer.layer]
    rate = rates(table, layer, features)
    down = layer.down.detach()
    if span == "layer":
        problems = [
            (
                features.flatten(1),
                down.movedim(0, 1).flatten(1),
                rate.repeat_interleave(layer.d_inter),
            )
        ]
        costs = costs.reshape(1, -1)
    else:
        problems = [
            (features[:, e], down[e], rate[e].expand(layer.d_inter))
            for e in range(layer.n_experts)
        ]
    for expected_of, cost in zip(problems, costs, strict=True):
        if not expected_of[0].any():
            assert not cost.any()
            continue
        for atom, expected in greedy(*expected_of):
            np.testing.assert_allclose(cost[atom], expected, **CLOSE)


def test_together_is_nearly_one_by_one(
    measured: tuple[Any, ImportanceTable], monkeypatch: pytest.MonkeyPatch
) -> None:
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
