"""Figure and table 8, estimators × ratios; the tables of other figures, a summary."""

import pandas as pd
from matplotlib.figure import Figure

from heapr_lab.figures.comparisons import figure_comparison
from heapr_lab.figures.curves import (
    AS_THE_PAPER,
    METRICS,
    OF_ATOMS,
    curves_data,
    matching,
    sort_curves,
)
from heapr_lab.figures.paper import paper_dense, paper_table
from heapr_lab.figures.style import LABELS, look, place
from heapr_lab.pruning.savings import at_context

DRAWN = ("heapr", "fisher", "shrunk", "heapr_total", "camera")
"""Estimators in the figure, where they were measured; the table has all."""
_PAPER_MODEL = "DeepSeekMoE-16B-Base"
_SUMMARY_RATIOS = (0.0, 0.1, 0.2, 0.25, 0.4, 0.5, 0.6, 0.8)


def main_data(results: pd.DataFrame) -> pd.DataFrame:
    """One curve per estimator over the ratios, with the paper's HEAPr on WikiText-2.

    An estimator that was evaluated with both scopes is shown with the global scope.

    Args:
        results: evaluation rows of one calibration, including dense rows.

    Returns:
        A curve frame (see `heapr_lab.figures.curves`) whose `name` is the estimator.
    """
    dense = results["estimator"].eq("dense")
    with_global = set(results.loc[results["scope"].eq("global"), "estimator"])
    main_scope = results["scope"].eq("global") | ~results["estimator"].isin(with_global)
    rows = results[dense | main_scope]
    ours = curves_data(rows, vary="estimator", settings=OF_ATOMS)
    return sort_curves(pd.concat([ours, _paper_heapr()]))


def _paper_heapr() -> pd.DataFrame:
    table = paper_table("main_results")
    rows = table[table["model"].eq(_PAPER_MODEL) & table["method"].eq("HEAPr")]
    perplexity = rows["wikitext2_ppl"].astype(float)
    return rows[["ratio"]].assign(
        value=perplexity,
        relative=perplexity / paper_dense(_PAPER_MODEL)["perplexity"],
        source="paper",
        name="heapr",
        model=_PAPER_MODEL,
        metric="perplexity",
        dataset="wikitext2",
    )


def figure_main(data: pd.DataFrame) -> Figure:
    """Every metric and data set, a panel each, of at most five estimators."""
    return figure_comparison(data[data["name"].isin(DRAWN)])


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


def summary_table(results: pd.DataFrame, savings: pd.DataFrame) -> pd.DataFrame:
    """Perplexities, accuracy and savings of the paper's method, a row for each ratio.

    Args:
        results: evaluation rows, including those of the dense model.
        savings: parameters and FLOPs saved per setting.
    """
    dense = results[results["estimator"].eq("dense")]
    rows = pd.concat([dense, matching(results, AS_THE_PAPER)])
    rows = rows[rows["metric"].isin(METRICS) & rows["ratio"].isin(_SUMMARY_RATIOS)]
    rows = rows.drop_duplicates(["ratio", "dataset", "metric"])
    label = rows["metric"] + " " + rows["dataset"]
    values = rows.assign(label=label).pivot(
        index="ratio", columns="label", values="value"
    )[label.unique()]
    saved = matching(savings, AS_THE_PAPER).drop_duplicates("ratio").set_index("ratio")
    (context,) = set(saved["seq_len"].map(at_context))
    names = {
        "parameter_reduction": "parameters saved",
        "flops_reduction": f"FLOPs saved {context}",
        "routed_flops_reduction": "routed FLOPs saved",
    }
    shares = saved[list(names)].rename(columns=names)
    return values.join(shares.reindex(values.index, fill_value=0.0)).reset_index()
