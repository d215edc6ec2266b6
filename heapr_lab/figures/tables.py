"""Figure and table 8: estimators × ratios."""

import pandas as pd
from matplotlib.figure import Figure

from heapr_lab.figures.comparisons import figure_comparison, plot_comparison
from heapr_lab.figures.curves import AS_THE_PAPER, METRICS, curves_data, sort_curves
from heapr_lab.figures.paper import paper_dense, paper_table
from heapr_lab.figures.style import LABELS, look, place

plot_main = plot_comparison
DRAWN = ("heapr", "fisher", "shrunk", "heapr_total", "camera")
"""Estimators in the figure, where they were measured; the table has all."""


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


def figure_main(data: pd.DataFrame) -> Figure:
    """Every metric and data set, a panel each, of at most five estimators."""
    names = list(dict.fromkeys(data["name"]))
    drawn = [name for name in DRAWN if name in names] or names[: len(DRAWN)]
    return figure_comparison(data[data["name"].isin(drawn)])


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
