"""Two budgets at once: masks of least score that save parameters and FLOPs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.savings import removed_score
from heapr_lab.pruning.selection import select

PRICES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""From parameters to operations, in the steps that fronts are drawn with."""
_N_HALVINGS = 10


def pareto_front(
    table: ImportanceTable,
    *,
    ratios: Sequence[float],
    prices: Sequence[float] = PRICES,
    estimator: str = "fisher",
    of: str = "model",
    evaluate: Callable[[KeepMask], Mapping[str, Any]] | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """The trade-off of parameters saved, operations saved and score, a row per point.

    With a price in (0, 1), no mask of the same kind saves as much of both as a row does
    with a smaller sum of scores: all rows are on the predicted front. To obtain the
    mask of a row, call `select` with its price and ratio, and `of`.

    Args:
        table: what was measured.
        ratios: pruning ratios; one row for each, with each price.
        prices: from parameters (0) to operations (1), as of `select`.
        estimator: one whose scores add up: fisher or heapr_total.
        of: what the ratio counts, as of `select`.
        evaluate: returns further columns of a row from its mask, such as a loss.
        **settings: of `select`.

    Returns:
        Columns price, ratio, achieved_ratio (of atoms), parameter_reduction (of the
        whole model), routed_flops_reduction, score (sum over the pruned atoms), and
        those of `evaluate`.
    """
    model, tokens = table.architecture, table.expert_tokens()
    common = {"estimator": estimator, "of": of, **settings}
    rows = []
    for price in prices:  # outside, because the ranking of the last price is cached
        for ratio in ratios:
            keep = select(table, ratio=ratio, price=price, **common)
            row = {
                "price": price,
                "ratio": ratio,
                "achieved_ratio": keep.achieved_ratio,
                "parameter_reduction": 1 - model.parameters(keep) / model.n_parameters,
                "routed_flops_reduction": model.routed_flops_saved(keep, tokens),
                "score": removed_score(table, keep),
            }
            rows.append(row | dict(evaluate(keep) if evaluate else {}))
    return pd.DataFrame(rows)


def mask_for_budgets(
    table: ImportanceTable,
    *,
    parameters: float,
    flops: float,
    estimator: str = "fisher",
    **settings: Any,
) -> KeepMask:
    """The mask of least score that saves enough parameters and enough operations.

    For each price masks are nested, so the larger of the two masks that meet one budget
    each meets both. Bisection finds the price at which the two masks coincide: there
    the mask is optimal, up to what its last atoms save beyond the budgets. Where one
    budget is the harder to meet at every price, the price approaches that budget's own.

    Args:
        table: what was measured.
        parameters: share of the whole model's parameters to save at least.
        flops: share of the routed experts' operations to save at least.
        estimator: one whose scores add up: fisher or heapr_total.
        **settings: of `select`, but for ratio, of, price and scope.

    Raises:
        SpecError: the scope is "layer", where masks of one budget are not nested in
            those of the other.
    """
    if settings.get("scope", "global") != "global":
        raise SpecError(f"two budgets need scope 'global', got {settings['scope']!r}")

    def cheapest(price: float) -> tuple[KeepMask, bool]:
        """The mask of a price, and whether parameters are the harder budget."""
        common = {"price": price, "estimator": estimator, **settings}
        small = select(table, ratio=parameters, of="model", **common)
        fast = select(table, ratio=flops, of="flops", **common)
        by_size = small.n_removed >= fast.n_removed
        return (small if by_size else fast), by_size

    low, high = 0.0, 1.0
    tried = [cheapest(low)[0], cheapest(high)[0]]
    for _ in range(_N_HALVINGS):
        price = (low + high) / 2
        keep, by_size = cheapest(price)
        tried.append(keep)
        low, high = (low, price) if by_size else (price, high)
    return min(tried, key=lambda keep: removed_score(table, keep))
