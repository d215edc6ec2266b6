"""Tables 8 and 9: estimators × ratios, and what measuring the scores costs."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heapr_lab.errors import SpecError
from heapr_lab.figures.comparisons import figure_comparison, plot_comparison
from heapr_lab.figures.curves import AS_THE_PAPER, METRICS, curves_data, sort_curves
from heapr_lab.figures.paper import paper_dense, paper_table
from heapr_lab.figures.style import (
    LABELS,
    add_legend,
    figure_of,
    look,
    own_axes,
    place,
    styled,
)

MIB = 2**20
NOT_COMPARABLE = "paper, not comparable (other model, data and machine)"
COST_COLUMNS = [
    "source",
    "method",
    "model",
    "d_model",
    "d_inter",
    "n_experts",
    "seconds",
    "peak_bytes",
    "state_bytes",
]

plot_main = plot_comparison
figure_main = figure_comparison


def main_data(
    results: pd.DataFrame, *, paper_model: str = "DeepSeekMoE-16B-Base"
) -> pd.DataFrame:
    """One curve per estimator over the ratios, with the paper's HEAPr on WikiText-2.

    An estimator that was evaluated with both scopes is shown with the global scope.

    Args:
        results: evaluation rows of one calibration, including dense rows.
        paper_model: the model whose published points are added.

    Returns:
        A curve frame (see `heapr_lab.figures.curves`) whose `name` is the estimator.
    """
    dense = results["estimator"].eq("dense")
    with_global = set(results.loc[results["scope"].eq("global"), "estimator"])
    main_scope = results["scope"].eq("global") | ~results["estimator"].isin(with_global)
    rows = results[dense | main_scope]
    ours = curves_data(rows, vary="estimator", settings=AS_THE_PAPER)
    return sort_curves(pd.concat([ours, _paper_heapr(paper_model)]))


def _paper_heapr(model: str) -> pd.DataFrame:
    table = paper_table("main_results")
    rows = table[table["model"].eq(model) & table["method"].eq("HEAPr")]
    perplexity = rows["wikitext2_ppl"].astype(float)
    return rows[["ratio"]].assign(
        value=perplexity,
        relative=perplexity / paper_dense(model)["perplexity"],
        source="paper",
        name="heapr",
        model=model,
        metric="perplexity",
        dataset="wikitext2",
    )


def main_table(data: pd.DataFrame) -> pd.DataFrame:
    """Our rows of `main_data` as the main table: a line per ratio and estimator.

    Returns:
        Columns `removed [%]`, `method`, then the perplexities, then the accuracies in
        per cent, each followed by its standard error, if known.
    """
    ours = data[data["source"].eq("ours")]
    # layer-wise counts are rounded down in each layer: 0.1999 is merged with 0.2
    ours = ours.assign(ratio=ours["ratio"].round(3))
    start = ours["ratio"].eq(0)
    # the dense model has one row, not one per estimator
    ours = ours.assign(name=ours["name"].mask(start, "dense"))
    ours = ours.drop_duplicates(["name", "ratio", "metric", "dataset"])
    lines = {}
    for metric in METRICS:
        scale = 100 if metric == "accuracy" else 1
        panel = ours[ours["metric"].eq(metric)]
        for dataset, group in panel.groupby("dataset"):
            rows = group.set_index(["ratio", "name"])
            lines[f"{dataset} {LABELS[metric]}"] = scale * rows["value"]
            if rows["stderr"].notna().any():
                lines[f"± {dataset} {metric}"] = scale * rows["stderr"]
    table = pd.DataFrame(lines).rename_axis(["ratio", "name"]).reset_index()
    by_look = table.assign(place=table["name"].map(place))
    table = table.loc[by_look.sort_values(["ratio", "place", "name"]).index]
    table = table.reset_index(drop=True)
    table.insert(0, "removed [%]", 100 * table.pop("ratio"))
    table.insert(1, "method", [look(name).label for name in table.pop("name")])
    return table


def comparison_table(data: pd.DataFrame) -> pd.DataFrame:
    """Any curve frame as a table of our rows and the paper's, marked as such.

    Returns:
        Columns `source`, `selection`, `removed [%]`, `metric`, `data set`, `value`,
        `relative to dense`.
    """
    rows = data[data["ratio"].gt(0) | data["source"].eq("paper")]
    source = rows["source"].where(
        rows["source"].eq("ours"), "paper, " + rows["model"] + ", not comparable"
    )
    return pd.DataFrame(
        {
            "source": source,
            "selection": [look(name).label for name in rows["name"]],
            "removed [%]": 100 * rows["ratio"],
            "metric": rows["metric"],
            "data set": rows["dataset"],
            "value": rows["value"],
            "relative to dense": rows["relative"],
        }
    ).reset_index(drop=True)


def cost_data(
    costs: Iterable[Mapping[str, Any]] | pd.DataFrame, *, baseline: str | None = None
) -> pd.DataFrame:
    """Measured costs and the paper's, in seconds and bytes.

    Args:
        costs: rows of method, model, d_model, d_inter, n_experts, seconds, peak_bytes
            and state_bytes.
        baseline: the method relative to whose time `times_baseline` is, per model.

    Returns:
        The rows of `costs` with `source` "ours", then the paper's with `source`
        "paper"; with a column `times_baseline` if there is a baseline.

    Raises:
        SpecError: the baseline was not measured on a model.
    """
    ours = pd.DataFrame(costs).assign(source="ours")
    if baseline is not None:
        base = ours[ours["method"].eq(baseline)].set_index("model")["seconds"]
        missing = sorted(set(ours["model"]) - set(base.index))
        if missing:
            raise SpecError(
                f"no row of baseline {baseline!r} for {missing}: found methods "
                f"{sorted(set(ours['method']))}. Measure the baseline on them too."
            )
        ours["times_baseline"] = ours["seconds"] / ours["model"].map(base)
    published = paper_table("cost")
    paper = pd.DataFrame(
        {
            "source": "paper",
            "method": published["method"],
            "model": published["model"],
            "seconds": 60.0 * published["gpu_minutes"],
            "peak_bytes": 1e9 * published["memory_gb"],
        }
    )
    extra = ["times_baseline"] if baseline is not None else []
    return pd.concat([ours, paper], ignore_index=True)[[*COST_COLUMNS, *extra]]


def cost_table(data: pd.DataFrame) -> pd.DataFrame:
    """`cost_data` for readers: seconds and MiB, the paper's rows marked as such."""
    ours = data["source"].eq("ours")
    table = pd.DataFrame(
        {
            "method": [look(name).label for name in data["method"]],
            "model": data["model"],
            "d_model": data["d_model"].astype("Int64"),
            "d_inter": data["d_inter"].astype("Int64"),
            "experts": data["n_experts"].astype("Int64"),
            LABELS["seconds"]: data["seconds"],
            LABELS["peak_bytes"]: data["peak_bytes"] / MIB,
            LABELS["state_bytes"]: data["state_bytes"] / MIB,
        }
    )
    if "times_baseline" in data:
        table["time ÷ baseline [×] ↓"] = data["times_baseline"]
    table["source"] = ["measured here" if own else NOT_COMPARABLE for own in ours]
    return table


def panel_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/latency_browser.py` for readers."""
    named = {
        "table": "table",
        "atoms": "atoms",
        "presses": "key presses",
        "median_ms": "median [ms] ↓",
        "p95_ms": "95 % within [ms] ↓",
    }
    return measured[list(named)].rename(columns=named)


def speed_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/speed.py` for readers: sliced against the faster dense model.

    Args:
        measured: mode, ratio, method, tokens_per_second, speedup_over_dense,
            predicted_speedup, share_of_predicted and parameter_bytes.

    Returns:
        A row for each mode and ratio; the speedup of all experts at once where it was
        measured.
    """
    sliced = measured[measured["method"].eq("sliced") & measured["ratio"].gt(0)]
    dense = measured[measured["ratio"].eq(0) & measured["method"].eq("sliced")]
    bytes_before = dense.set_index("mode")["parameter_bytes"]
    return pd.DataFrame(
        {
            "mode": sliced["mode"].str.replace("_", " "),
            "ratio": sliced["ratio"],
            "tokens per second ↑": sliced["tokens_per_second"],
            "÷ dense ↑": sliced["speedup_over_dense"],
            **_at_once(measured, sliced[["mode", "ratio"]]),
            "predicted": sliced["predicted_speedup"],
            "reached of it ↑": sliced["share_of_predicted"],
            "bytes ÷ dense ↓": sliced["parameter_bytes"]
            / sliced["mode"].map(bytes_before),
        }
    ).reset_index(drop=True)


def _at_once(measured: pd.DataFrame, keys: pd.DataFrame) -> dict[str, Any]:
    """The column of sliced models that run all experts at once, if there are any."""
    found = measured[measured["method"].eq("sliced_at_once")]
    if found.empty:
        return {}
    speedups = found.set_index(["mode", "ratio"])["speedup_over_dense"]
    return {"at once ÷ dense ↑": speedups[pd.MultiIndex.from_frame(keys)].to_numpy()}


def serving_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/serving.py` for readers: each structure against dense.

    Args:
        measured: mode, structure, ratio, speedup_over_dense and share_of_predicted.
    """
    pruned = measured[measured["ratio"].gt(0)]
    columns = {}
    for structure, rows in pruned.groupby("structure", sort=False):
        own = rows.set_index(["mode", "ratio"])
        columns[f"{structure} ÷ dense ↑"] = own["speedup_over_dense"]
        columns[f"{structure}: of predicted ↑"] = own["share_of_predicted"]
    table = pd.DataFrame(columns)
    order = pruned[["mode", "ratio"]].drop_duplicates()
    table = table.loc[list(order.itertuples(index=False, name=None))].reset_index()
    return table.assign(mode=table["mode"].str.replace("_", " "))


@styled
def plot_cost(
    data: pd.DataFrame, *, quantity: str = "seconds", ax: Axes | None = None
) -> Axes:
    """Bars of one measured cost, a group per model and a bar per method.

    The paper's costs are only in the table: they are of models a thousand times as
    large, on another machine.

    Args:
        data: from `cost_data`.
        quantity: "seconds", "peak_bytes" or "state_bytes".
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ours = data[data["source"].eq("ours")]
    models = list(ours["model"].drop_duplicates())
    methods = list(ours["method"].drop_duplicates())
    ax = own_axes(ax)
    height = 0.8 / len(methods)
    for number, method in enumerate(methods):
        costs = ours[ours["method"].eq(method)].set_index("model")[quantity]
        values = costs.reindex(models).to_numpy(dtype=float)
        shift = (number - (len(methods) - 1) / 2) * height
        rows = np.arange(len(models)) + shift
        scale = 1 if quantity == "seconds" else MIB
        color, label = look(method).color, look(method).label
        ax.barh(rows, values / scale, height=height, color=color, label=label)
    ax.set_yticks(range(len(models)), models)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(LABELS[quantity])
    add_legend(ax)
    return ax


@styled
def figure_cost(data: pd.DataFrame) -> Figure:
    """Time, peak memory and state side by side, with one legend."""
    quantities = ("seconds", "peak_bytes", "state_bytes")

    def draw(quantity: str, ax: Axes) -> None:
        plot_cost(data, quantity=quantity, ax=ax)
        if quantity != quantities[0]:
            ax.set_yticklabels([])

    return figure_of(quantities, draw, height=2.6)
