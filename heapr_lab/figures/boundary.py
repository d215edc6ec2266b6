"""Figure 4: accuracy, perplexity and FLOPs saved against the pruning ratio."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heapr_lab.figures.curves import (
    AS_THE_PAPER,
    CURVE_COLUMNS,
    curves_data,
    draw_curve,
    draw_paper_points,
    finish_panel,
    matching,
    name_models,
    paper_table,
    savings_curves,
    sort_curves,
)
from heapr_lab.figures.style import (
    LABELS,
    PAPER_GREY,
    figure_of,
    look,
    own_axes,
    show_percent,
    styled,
)

_QUANTITIES = ("accuracy", "perplexity", "flops_reduction")


def boundary_data(results: pd.DataFrame, savings: pd.DataFrame) -> pd.DataFrame:
    """Accuracy, perplexity and FLOPs saved over the ratio, with the paper's statements.

    The paper's ratio is a share of the whole model. Divided by the routed share of our
    model it is a position on our axis of routed atomic experts, so that the second axis
    shows the paper's value.

    Args:
        results: evaluation rows of one calibration, including dense rows.
        savings: parameters and FLOPs saved per setting.

    Returns:
        A curve frame (see `heapr_lab.figures.curves`) with two more columns:
        `parameter_reduction`, the share of the whole model that is removed, and
        `at_most`, True where the paper says "below".
    """
    saved = matching(savings, AS_THE_PAPER)
    share = saved["parameter_reduction"].sum() / saved["achieved_ratio"].sum()
    ours = pd.concat(
        [
            curves_data(results, vary="estimator", settings=AS_THE_PAPER),
            savings_curves(savings, vary="estimator", settings=AS_THE_PAPER),
        ]
    )
    paper = _paper_boundary(share)
    data = pd.concat([sort_curves(ours).assign(at_most=False), paper])
    data["parameter_reduction"] = data["ratio"] * share
    return data.reset_index(drop=True)


def _paper_boundary(share: float) -> pd.DataFrame:
    table = paper_table("boundary")
    stated = table["share_of_model_removed"].astype(str)
    base = pd.DataFrame(
        {
            "source": "paper",
            "name": "heapr",
            "model": table["model"],
            "ratio": stated.str.lstrip("<").astype(float) / share,
            "dataset": "",
            "at_most": stated.str.startswith("<"),
        }
    )
    accuracy = base.assign(metric="accuracy", relative=table["accuracy_retained"])
    flops = base.assign(metric="flops_reduction", value=table["flops_reduction"])
    rows = pd.concat([accuracy, flops])
    return rows.reindex(columns=[*CURVE_COLUMNS, "at_most"])


@styled
def plot_boundary(data: pd.DataFrame, *, quantity: str, ax: Axes | None = None) -> Axes:
    """One quantity of the pruning boundary, with the share of the model on top.

    Args:
        data: from `boundary_data`.
        quantity: "accuracy" (of the dense model's), "perplexity" (log axis) or
            "flops_reduction".
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes; the second x axis is its child.
    """
    ax = own_axes(ax)
    rows = data[data["metric"].eq(quantity)]
    ours = rows[rows["source"].eq("ours")]
    column = "relative" if quantity == "accuracy" else "value"
    for dataset in ours["dataset"].drop_duplicates():
        _draw_curve(ax, ours[ours["dataset"].eq(dataset)], column=column)
    statements = rows[rows["source"].eq("paper")]
    draw_paper_points(ax, statements, column=column)
    _draw_ranges(ax, statements[statements["at_most"]], column=column)
    if quantity != "perplexity":
        ax.set_ylim(bottom=0)
    _draw_model_axis(ax, data)
    finish_panel(ax, rows, quantity, relative=quantity == "accuracy")
    name_models(ax, statements, column=column)
    return ax


def _draw_curve(ax: Axes, curve: pd.DataFrame, *, column: str) -> None:
    dataset, metric = curve[["dataset", "metric"]].iloc[0]
    flops = metric == "flops_reduction"
    shown = look(metric if flops else dataset)
    label = f"FLOPs {dataset}" if flops else shown.label
    draw_curve(ax, curve, column=column, **shown.keywords() | {"label": label})


def _draw_ranges(ax: Axes, statements: pd.DataFrame, *, column: str) -> None:
    for row in statements.to_dict("records"):
        # "below 0.4" includes every smaller share: an arrow to the left
        ends = row["ratio"] - np.array([0.13, 0.03])
        ax.plot(ends, 2 * [row[column]], "<-", color=PAPER_GREY, markevery=2, lw=1)


def _draw_model_axis(ax: Axes, data: pd.DataFrame) -> None:
    removed = data[data["ratio"].gt(0)]
    share = removed["parameter_reduction"].sum() / removed["ratio"].sum()
    end = max(1.0, data["ratio"].max()) + 0.05
    ax.set_xlim(-0.03, end)
    ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    if end > 1.06:
        ax.axvspan(1, end, color="#F0F0F0", zorder=0)
        ax.text(
            (1 + end) / 2,
            0.5,
            "out of reach\nof our model",
            transform=ax.get_xaxis_transform(),
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=8,
            color="#777777",
        )
    top = ax.secondary_xaxis(
        "top", functions=(lambda x: x * share, lambda y: y / share)
    )
    top.set_xlabel(LABELS["parameter_reduction"])
    top.set_xticks(np.arange(0, end * share, 0.2))
    show_percent(top.xaxis)


@styled
def figure_boundary(data: pd.DataFrame) -> Figure:
    """Accuracy, perplexity and FLOPs saved side by side, with one legend."""
    return figure_of(
        _QUANTITIES,
        lambda name, ax: plot_boundary(data, quantity=name, ax=ax),
        height=3.0,
    )
