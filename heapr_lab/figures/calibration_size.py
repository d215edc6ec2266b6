"""Figure 3: quality against the amount of calibration text, for each corpus."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from heapr_lab.figures.curves import (
    AS_THE_PAPER,
    METRICS,
    matching,
    panels_of,
)
from heapr_lab.figures.style import (
    LABELS,
    REFERENCE_LINE,
    add_legend,
    figure_of,
    literal,
    look,
    own_axes,
    show_percent,
    styled,
)


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
    add_legend(ax)
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
