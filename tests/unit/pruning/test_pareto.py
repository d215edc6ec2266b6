"""Fronts and two budgets, against all that one could choose from."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.pareto import PRICES, mask_for_budgets, pareto_front
from heapr_lab.pruning.savings import removed_score
from heapr_lab.pruning.selection import select


def mixed_table(seed: int = 0) -> ImportanceTable:
    """Two layers whose atoms differ in parameters, and experts in tokens."""
    rng = np.random.default_rng(seed)
    layers = {
        0: LayerShape(n_experts=4, d_inter=20, d_expert=4),
        1: LayerShape(n_experts=4, d_inter=20, d_expert=12),
    }
    layer, expert, atom = np.indices((2, 4, 20)).reshape(3, -1)
    tokens = np.array([rng.permutation([2, 5, 14, 29]) for _ in layers])[layer, expert]
    frame = pd.DataFrame(
        {"layer": layer, "expert": expert, "atom": atom, "tokens": tokens}
    )
    sums = {
        "sum_h2": 1.0,
        "sum_g2": rng.random(160),
        "sum_hg2": rng.exponential(1, 160),
    }
    model = Architecture(4000, 2, 8, layers, 10, 0)
    return ImportanceTable.from_frame(
        frame.assign(**sums), architecture=model.to_dict(), N=50
    )


# --- fronts -----------------------------------------------------------------------


def test_a_row_for_each_price_and_ratio() -> None:
    """Each is what `select` finds with its price and ratio, counted."""
    table = mixed_table()
    assert PRICES == (0.0, 0.25, 0.5, 0.75, 1.0)
    rows = pareto_front(table, ratios=[0.1, 0.3])
    assert rows["price"].tolist() == np.repeat(PRICES, 2).tolist()
    assert rows["ratio"].tolist() == [0.1, 0.3] * 5
    model, tokens = table.architecture, table.expert_tokens()
    for row in rows.to_dict("records"):
        asked = {"ratio": row.pop("ratio"), "price": row.pop("price")}
        keep = select(table, estimator="fisher", of="model", **asked)
        assert row == {
            "achieved_ratio": keep.achieved_ratio,
            "parameter_reduction": pytest.approx(1 - model.parameters(keep) / 4000),
            "routed_flops_reduction": model.routed_flops_saved(keep, tokens),
            "score": removed_score(table, keep),
        }
    assert rows["score"].nunique() > 5


def test_what_is_measured_and_chosen_goes_into_the_rows() -> None:
    """Further columns come from each mask; settings reach the selection."""
    table = mixed_table()
    masks: list[KeepMask] = []

    def evaluate(keep: KeepMask) -> dict[str, Any]:
        masks.append(keep)
        return {"n": keep.n_removed}

    settings = {"estimator": "heapr_total", "of": "atoms", "min_atoms": 12}
    rows = pareto_front(
        table, ratios=[0.3], prices=[0.5], evaluate=evaluate, **settings
    )
    assert masks == [select(table, ratio=0.3, price=0.5, **settings)]
    assert masks[0].settings["estimator"] == "heapr_total"
    assert rows["n"].tolist() == [48]
    assert masks[0].widths().to_numpy().min() >= 12


# --- two budgets ------------------------------------------------------------------


def best_of_a_grid(table: ImportanceTable, **budgets: float) -> float:
    """The least score of the masks that meet both budgets, at 33 prices."""
    scores = []
    for price in np.linspace(0, 1, 33):
        asked = {"price": float(price), "estimator": "fisher"}
        small = select(table, ratio=budgets["parameters"], of="model", **asked)
        fast = select(table, ratio=budgets["flops"], of="flops", **asked)
        larger = max(small, fast, key=lambda keep: keep.n_removed)
        scores.append(removed_score(table, larger))
    return min(scores)


@pytest.mark.parametrize("seed", range(2))
def test_the_price_of_two_budgets_is_found(seed: int) -> None:
    """No price of a grid does better, and neither end of it as well."""
    table = mixed_table(seed)
    budgets = {"parameters": 0.3, "flops": 0.5}
    keep = mask_for_budgets(table, **budgets)
    assert removed_score(table, keep) <= best_of_a_grid(table, **budgets)
    model = table.architecture
    assert 1 - model.parameters(keep) / 4000 >= 0.3
    assert model.routed_flops_saved(keep, table.expert_tokens()) >= 0.5
    assert 0 < keep.settings["price"] < 1


def test_one_budget_alone_has_its_own_price() -> None:
    """Where the other one asks for nothing."""
    table = mixed_table()
    alone = {"estimator": "fisher", "ratio": 0.4}
    small = mask_for_budgets(table, parameters=0.4, flops=0)
    fast = mask_for_budgets(table, parameters=0, flops=0.4)
    by_size = select(table, of="model", price=0, **alone)
    by_time = select(table, of="flops", price=1, **alone)
    assert removed_score(table, small) <= removed_score(table, by_size)
    assert removed_score(table, fast) <= removed_score(table, by_time)
    assert small.n_removed > 0
    assert small != fast


def test_settings_reach_both_masks() -> None:
    """An estimator, and what stays; scope 'global' may be said."""
    table = mixed_table()
    settings = {"estimator": "heapr_total", "min_atoms": 2, "scope": "global"}
    keep = mask_for_budgets(table, parameters=0.05, flops=0.3, **settings)
    assert {name: keep.settings[name] for name in settings} == settings
    with pytest.raises(SpecError, match="need scope 'global', got 'layer'"):
        mask_for_budgets(table, parameters=0.1, flops=0.1, scope="layer")
