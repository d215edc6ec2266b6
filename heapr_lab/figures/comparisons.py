"""Figures 3, 5, 6 and 8 and the tables: what differs by one setting, compared.

The settings are the amount of calibration text, granularity, scope and estimator.
Values of the last three are relative to the dense model, so that they can be shown
beside the paper's, which are of another model and other data.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from heapr_lab.figures.curves import (
    AS_THE_PAPER,
    METRICS,
    OF_ATOMS,
    curves_data,
    draw_curves,
    finish_panel,
    matching,
    name_models,
    panel,
    panels_of,
    paper_dense,
    paper_table,
    savings_curves,
    sort_curves,
)
from heapr_lab.figures.style import (
    LABELS,
    REFERENCE_LINE,
    figure_of,
    literal,
    look,
    own_axes,
    place,
    show_percent,
    styled,
)
from heapr_lab.pruning.savings import at_context
from heapr_lab.tasks.paper_tasks import PAPER_TASKS

_LEVELS = {"Expert": "expert", "Atomic Expert": "atom"}
_SCOPES = {"HEAPr-L": "layer", "HEAPr-G": "global"}
_PAPER_MODEL = "DeepSeekMoE-16B-Base"
_SCOPE_MODEL = "Qwen1.5-MoE-A2.7B-Chat"
DRAWN = ("heapr", "fisher", "heapr_total", "camera")
"""Estimators in the figure, where they were measured; the table has all."""
_SUMMARY_RATIOS = (0.0, 0.1, 0.2, 0.25, 0.4, 0.5, 0.6, 0.8)


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
    perplexity = rows[["ratio"]].assign(
        value=rows["wikitext2_ppl"].astype(float),
        name="heapr",
        metric="perplexity",
        dataset="wikitext2",
    )
    return _of_paper(perplexity, _PAPER_MODEL)


def _of_paper(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """Values of the paper as rows of a curve frame, relative to its dense model."""
    relative = rows["value"] / rows["metric"].map(paper_dense(model))
    return rows.assign(relative=relative, source="paper", model=model)


def _title(metric: str, dataset: str) -> str:
    if metric == "flops_reduction":
        return f"whole model, {dataset}".replace(" at ", " at\n")
    return look(dataset).label


def _paper_granularity() -> pd.DataFrame:
    table = paper_table("granularity")
    table = table[table["model"].eq(_PAPER_MODEL)]
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
    return _of_paper(rows.assign(dataset=""), _PAPER_MODEL)


def _paper_scopes() -> pd.DataFrame:
    table = paper_table("global_vs_layer")
    table = table[table["model"].eq(_SCOPE_MODEL) & table["method"].isin(list(_SCOPES))]
    rows = pd.DataFrame(
        {
            "name": table["method"].map(_SCOPES),
            "ratio": table["ratio"],
            "value": table[list(PAPER_TASKS)].mean(axis=1) / 100,
            "metric": "accuracy",
            "dataset": "",
        }
    )
    return _of_paper(rows, _SCOPE_MODEL)


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
    return ax


@styled
def figure_comparison(data: pd.DataFrame) -> Figure:
    """Every metric and data set of a curve frame, a panel each, with one legend."""

    def draw(pair: tuple[str, str], ax: Axes) -> None:
        plot_comparison(data, metric=pair[0], dataset=pair[1], ax=ax)

    return figure_of(panels_of(data[data["source"].eq("ours")]), draw)


figure_granularity = figure_scope = figure_comparison


def figure_main(data: pd.DataFrame) -> Figure:
    """Every metric and data set, a panel each, of the estimators in `DRAWN`."""
    return figure_comparison(data[data["name"].isin(DRAWN)])


# --- calibration size ---------------------------------------------------------------


def calibration_size_data(results: pd.DataFrame, *, ratio: float) -> pd.DataFrame:
    """Mean and spread over seeds of each metric, per corpus and calibration size.

    Args:
        results: evaluation rows of several calibrations and of the dense model.
        ratio: the requested pruning ratio.

    Returns:
        Columns calibration, n_sequences, metric, dataset, value (mean over seeds),
        spread (standard deviation over seeds, NaN for one seed), n_seeds, dense.
    """
    settings = AS_THE_PAPER | {"ratio": ratio}
    rows = matching(results[results["metric"].isin(METRICS)], settings)
    keys = ["calibration", "n_sequences", "metric", "dataset"]
    rows = rows.drop_duplicates([*keys, "seed"])
    data = (
        rows.groupby(keys)["value"]
        .agg(value="mean", spread="std", n_seeds="size")
        .reset_index()
    )
    data["n_sequences"] = data["n_sequences"].astype(int)
    dense = results[results["estimator"].eq("dense")]
    dense = dense.groupby(["metric", "dataset"])["value"].first().rename("dense")
    return data.merge(dense.reset_index(), how="left", on=["metric", "dataset"])


@styled
def plot_calibration_size(
    data: pd.DataFrame, *, metric: str, dataset: str, ax: Axes | None = None
) -> Axes:
    """One metric against the number of calibration sequences, one curve per corpus.

    Error bars are one standard deviation over the seeds, as the legend says.

    Args:
        data: from `calibration_size_data`.
        metric: "perplexity" or "accuracy".
        dataset: where it was measured.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.

    Raises:
        SpecError: there is no such panel.
    """
    rows = matching(data, {"metric": metric, "dataset": dataset})
    ax = own_axes(ax)
    for corpus, curve in rows.groupby("calibration"):
        shown = look(str(corpus))
        ax.errorbar(
            curve["n_sequences"],
            curve["value"],
            yerr=curve["spread"].fillna(0),
            **shown.keywords() | {"label": f"calibrated on {shown.label}"},
        )
    ax.axhline(rows["dense"].iloc[0], label="dense model", **REFERENCE_LINE)
    if (seeds := int(data["n_seeds"].max())) > 1:
        note = f"error bars: ± 1 s.d. over {seeds} seeds"
        ax.plot([], [], linestyle="none", marker="|", color="#555555", label=note)
    _finish(ax, rows, metric=metric)
    ax.set_title(literal(look(dataset).label))
    return ax


def _finish(ax: Axes, rows: pd.DataFrame, *, metric: str) -> None:
    sizes = sorted(set(rows["n_sequences"]))
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(LABELS["n_sequences"])
    ax.set_ylabel(LABELS[metric])
    if metric == "accuracy":
        show_percent(ax.yaxis)


@styled
def figure_calibration_size(data: pd.DataFrame) -> Figure:
    """Every metric and data set, one panel each, with one legend."""

    def draw(pair: tuple[str, str], ax: Axes) -> None:
        plot_calibration_size(data, metric=pair[0], dataset=pair[1], ax=ax)

    return figure_of(panels_of(data), draw, height=2.6)


# --- tables -------------------------------------------------------------------------


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
