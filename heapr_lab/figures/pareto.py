"""Two budgets: Δloss against operations saved, at equal parameters saved."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heapr_lab.figures.style import (
    LABELS,
    REFERENCE_GREY,
    figure_by_ratio,
    look,
    own_axes,
    place,
    show_percent,
    styled,
)
from heapr_lab.importance.estimators import PER_TOKEN

_SAVINGS = ["parameter_reduction", "routed_flops_reduction"]
_DOMINATED = "dominated by another point"


def pareto_data(measured: pd.DataFrame) -> pd.DataFrame:
    """Savings and Δloss of every estimator, price and ratio, and the Pareto front.

    Args:
        measured: rows of `benchmarks/pareto.py`, of one model.

    Returns:
        Columns model, estimator, price (0: parameters, 1: operations), ratio
        (requested, of the model's parameters), parameter_reduction,
        routed_flops_reduction, score (sum over the pruned atoms), delta_nll in nats per
        token, and efficient: whether no other row is at least as good in both savings
        and in Δloss and better in one of the three.
    """
    columns = ["model", "estimator", "price", "ratio", *_SAVINGS, "score", "delta_nll"]
    losses = np.column_stack([-measured[_SAVINGS], measured["delta_nll"]])
    # [i, j]: row j is at least as good as row i in everything
    as_good = np.all(losses[None] <= losses[:, None], axis=2)
    beaten = np.any(as_good & ~as_good.T, axis=1)
    return measured[columns].assign(efficient=~beaten)


@styled
def plot_pareto(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Δloss against operations saved, a curve over the prices for each estimator.

    Hollow points are not on the Pareto front.

    Args:
        data: from `pareto_data`, of one ratio.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    x, y = "routed_flops_reduction", "delta_nll"
    hollow: dict[str, Any] = {"markerfacecolor": "white", "linestyle": "none"}
    for name in sorted(data["estimator"].unique(), key=place):
        line = look(name).keywords()
        rows = data[data["estimator"].eq(name)].sort_values("price")
        marked = np.flatnonzero(rows["efficient"]).tolist()
        ax.plot(rows[x], rows[y], markevery=marked, **line)
        beaten = rows[~rows["efficient"]]
        ax.plot(beaten[x], beaten[y], **line | hollow | {"label": None})
    ax.plot([], [], color=REFERENCE_GREY, marker="o", label=_DOMINATED, **hollow)
    ax.set_xlabel("routed FLOPs saved [%] ↑")
    ax.set_ylabel(LABELS["delta_nll"])
    show_percent(ax.xaxis)
    return ax


@styled
def figure_pareto(data: pd.DataFrame) -> Figure:
    """One panel for each ratio; prices increase along each curve from 0 on the left."""
    return figure_by_ratio(data, plot_pareto, title="{:g} % of parameters")


def pareto_table(data: pd.DataFrame) -> pd.DataFrame:
    """`pareto_data` for readers: a row for each ratio, estimator and price."""
    ordered = data.sort_values(
        ["ratio", "estimator", "price"],
        key=lambda column: column.map(place) if column.name == "estimator" else column,
    )
    return pd.DataFrame(
        {
            "parameters saved [%]": 100 * ordered["parameter_reduction"],
            "estimator": ordered["estimator"],
            "price": ordered["price"],
            "routed FLOPs saved [%] ↑": 100 * ordered["routed_flops_reduction"],
            "summed score": ordered["score"],
            f"Δloss [{PER_TOKEN}] ↓": ordered["delta_nll"],
            "on the front": ordered["efficient"].map({True: "yes", False: ""}),
        }
    ).reset_index(drop=True)
