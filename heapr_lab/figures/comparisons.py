"""Atomic against whole experts, and global against layer-wise selection.

Values are relative to the dense model, so that they can be shown beside the paper's,
which are of another model and other data.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heapr_lab.figures.curves import (
    OF_ATOMS,
    curves_data,
    draw_curves,
    finish_panel,
    name_models,
    panel,
    panels_of,
    savings_curves,
    sort_curves,
)
from heapr_lab.figures.paper import paper_dense, paper_table
from heapr_lab.figures.style import (
    add_legend,
    figure_of,
    literal,
    look,
    own_axes,
    styled,
)
from heapr_lab.tasks.paper_tasks import PAPER_TASKS

_LEVELS = {"Expert": "expert", "Atomic Expert": "atom"}
_SCOPES = {"HEAPr-L": "layer", "HEAPr-G": "global"}
_GRANULARITY_MODEL = "DeepSeekMoE-16B-Base"
_SCOPE_MODEL = "Qwen1.5-MoE-A2.7B-Chat"


def granularity_data(results: pd.DataFrame, savings: pd.DataFrame) -> pd.DataFrame:
    """Curves of pruning whole experts and of pruning atomic experts, with the paper's.

    Args:
        results: evaluation rows of one calibration, including dense rows.
        savings: parameters and FLOPs saved per setting.

    Returns:
        A curve frame (see `heapr_lab.figures.curves`) whose `name` is "atom" or
        "expert"; metrics perplexity, accuracy and flops_reduction.
    """
    settings = {"estimator": "heapr", "scope": "global", "structure": "ragged"}
    ours = curves_data(results, vary="granularity", settings=settings)
    saved = savings_curves(savings, vary="granularity", settings=settings)
    paper = _paper_granularity()
    if ours["dataset"].eq("wikitext2").any():
        # the paper's perplexity is on WikiText-2; without it, every panel shows it
        paper.loc[paper["metric"].eq("perplexity"), "dataset"] = "wikitext2"
    return sort_curves(pd.concat([ours, saved, paper]))


def scope_data(results: pd.DataFrame) -> pd.DataFrame:
    """Curves of global and of layer-wise pruning of atomic experts, with the paper's.

    The paper's points are those of Qwen1.5-MoE: for DeepSeekMoE the paper gives
    `acc_norm` without its dense value, so that it cannot be made relative. Averages are
    over the seven tasks; for HEAPr-G at 25 % the paper prints a different average.

    Args:
        results: evaluation rows of one calibration, including dense rows.

    Returns:
        A curve frame whose `name` is "global" or "layer".
    """
    settings = OF_ATOMS | {"estimator": "heapr"}
    ours = curves_data(results, vary="scope", settings=settings)
    return sort_curves(pd.concat([ours, _paper_scopes()]))


def _title(metric: str, dataset: str) -> str:
    flops = metric == "flops_reduction"
    return f"whole model\n{dataset}" if flops else look(dataset).label


def _paper_granularity() -> pd.DataFrame:
    table = paper_table("granularity")
    dense = paper_dense(_GRANULARITY_MODEL)
    table = table[table["model"].eq(_GRANULARITY_MODEL)]
    wide = pd.DataFrame(
        {
            "name": table["level"].map(_LEVELS),
            "ratio": table["ratio"],
            "perplexity": table["wikitext2_ppl"],
            "accuracy": table[list(PAPER_TASKS)].mean(axis=1) / 100,
            "flops_reduction": table["flops_reduction"],
        }
    )
    rows = wide.melt(["name", "ratio"], var_name="metric")
    rows["relative"] = rows["value"] / rows["metric"].map(dense)
    return rows.assign(source="paper", model=_GRANULARITY_MODEL, dataset="")


def _paper_scopes() -> pd.DataFrame:
    table = paper_table("global_vs_layer")
    dense = paper_dense(_SCOPE_MODEL)
    table = table[table["model"].eq(_SCOPE_MODEL) & table["method"].isin(list(_SCOPES))]
    rows = pd.DataFrame(
        {
            "name": table["method"].map(_SCOPES),
            "ratio": table["ratio"],
            "value": table[list(PAPER_TASKS)].mean(axis=1) / 100,
        }
    )
    rows["relative"] = rows["value"] / dense["accuracy"]
    return rows.assign(
        source="paper", model=_SCOPE_MODEL, metric="accuracy", dataset=""
    )


@styled
def plot_comparison(
    data: pd.DataFrame, *, metric: str, dataset: str, ax: Axes | None = None
) -> Axes:
    """One metric of a curve frame against the ratio, relative to the dense model.

    Args:
        data: from `granularity_data`, `scope_data` or `main_data`.
        metric: "perplexity" (log axis), "accuracy" or "flops_reduction".
        dataset: a data set of that metric.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    rows = panel(data, metric, dataset)
    ax = own_axes(ax)
    relative = metric != "flops_reduction"
    column = "relative" if relative else "value"
    draw_curves(ax, rows, column=column)
    finish_panel(ax, rows, metric, relative=relative)
    paper = rows[rows["source"].eq("paper")].sort_values(["ratio", column])
    name_models(ax, paper.tail(1), column=column)
    ax.set_title(literal(_title(metric, dataset)))
    add_legend(ax)
    return ax


@styled
def figure_comparison(data: pd.DataFrame) -> Figure:
    """Every metric and data set of a curve frame, a panel each, with one legend."""

    def draw(pair: tuple[str, str], ax: Axes) -> None:
        plot_comparison(data, metric=pair[0], dataset=pair[1], ax=ax)

    return figure_of(panels_of(data[data["source"].eq("ours")]), draw)


figure_granularity = figure_scope = figure_comparison
