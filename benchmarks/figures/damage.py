"""Δloss predicted from summed scores by a map fitted at a few ratios, and measured."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures.looks import look
from heapr_lab.figures.style import (
    LABELS,
    REFERENCE_GREY,
    REFERENCE_LINE,
    own_axes,
    panels,
    share_legend,
    styled,
)
from heapr_lab.importance.estimators import PER_TOKEN

_MAP = ["estimator", "corpus", "calibrated_on", "n_points"]
"""Columns that identify a map and the corpus for which it predicts."""

_MARGIN = 1.4


def damage_data(measured: pd.DataFrame) -> pd.DataFrame:
    """Predicted and measured Δloss in nats per token, by map and ratio.

    Args:
        measured: rows of `benchmarks/damage.py`.

    Returns:
        Columns estimator, corpus (of the predicted Δloss), calibrated_on (the corpus
        whose Δloss the map was fitted to), n_points (of the fit), ratio, used_for_fit,
        predicted, measured, relative_error (predicted ÷ measured − 1; missing unless
        the measured Δloss is above 0) and naive (the summed score itself; missing
        unless its unit is nats per predicted token).
    """
    columns = [*_MAP, "ratio", "used_for_fit", "predicted", "measured"]
    truth = measured["measured"].where(measured["measured"].gt(0))
    error = measured["predicted"] / truth - 1
    return measured[columns].assign(relative_error=error, naive=measured["naive"])


@styled
def plot_damage(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Measured against predicted Δloss on logarithmic axes, with the identity.

    Points with filled markers were used for the fit, those with hollow ones were not.

    Args:
        data: from `damage_data`, of one corpus, calibrated_on and n_points; rows whose
            measured Δloss is not above 0 are not drawn.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    drawn = data[data["measured"].gt(0)]
    low, high = _limits(drawn)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    label = "prediction = measurement"
    ax.axline((low, low), (high, high), zorder=1, label=label, **REFERENCE_LINE)
    for name, rows in drawn.groupby("estimator", sort=False):
        style = look(str(name))
        for used, part in rows.groupby("used_for_fit"):
            ax.plot(
                part["predicted"],
                part["measured"],
                linestyle="none",
                color=style.color,
                marker=style.marker,
                markerfacecolor=style.color if used else "none",
                label=None if used else style.label,
            )
    ax.plot(
        [],
        [],
        linestyle="none",
        color=REFERENCE_GREY,
        marker="o",
        label="filled: used for the fit",
    )
    ax.set_xlabel(f"predicted Δloss [{PER_TOKEN}]")
    ax.set_ylabel(LABELS["delta_nll"])
    return ax


def _limits(data: pd.DataFrame) -> tuple[float, float]:
    """Limits of both axes, with a margin around every Δloss of `data`."""
    values = data[["predicted", "measured"]].to_numpy()
    return float(values.min()) / _MARGIN, float(values.max()) * _MARGIN


@styled
def figure_damage(data: pd.DataFrame) -> Figure:
    """A panel for each corpus and each corpus that its map was fitted on.

    Only the maps fitted to the most points are shown; all panels have the same limits.
    """
    shown = data[data["n_points"].eq(data["n_points"].max())]
    groups = list(shown.groupby(["corpus", "calibrated_on"], sort=False))
    figure, axes = panels(len(groups), height=2.9)
    limits = _limits(shown[shown["measured"].gt(0)])
    for ((corpus, source), rows), ax in zip(groups, axes, strict=True):
        plot_damage(rows, ax=ax)
        ax.set_title(f"{look(corpus).label}\nby the map of {look(source).label}")
        ax.set(xlim=limits, ylim=limits)
    for ax in axes[1:]:
        ax.set_ylabel("")
    share_legend(figure)
    return figure


def damage_table(data: pd.DataFrame) -> pd.DataFrame:
    """Errors of each map at the ratios that it was not fitted to.

    Errors are |predicted ÷ measured − 1|. `naive ÷ measured` is the median for the
    summed score itself; missing unless its unit is nats per predicted token.
    """
    unused = data[~data["used_for_fit"]]
    size = unused["relative_error"].abs()
    frame = unused.assign(size=100 * size, naive=unused["naive"] / unused["measured"])
    rows = []
    for names, part in frame[size.notna()].groupby(_MAP, sort=False):
        worst = part.loc[part["size"].idxmax()]
        row = dict(zip(_MAP, names, strict=True)) | {
            "median error [%] ↓": part["size"].median(),
            "largest error [%] ↓": worst["size"],
            "at ratio [%]": round(100 * worst["ratio"]),
            "naive ÷ measured": part["naive"].median(),
        }
        rows.append(row)
    return pd.DataFrame(rows).rename(
        columns={"calibrated_on": "map of", "n_points": "points"}
    )
