"""What structures of widths cost: Δloss against the multiple that widths are of."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from heapr_lab.figures.style import (
    LABELS,
    REFERENCE_GREY,
    look,
    own_axes,
    panels,
    share_legend,
    styled,
)

RAGGED = "ragged"


def structures_data(measured: pd.DataFrame) -> pd.DataFrame:
    """Δloss in nats per token by structure, multiple and ratio.

    Args:
        measured: rows of `benchmarks/structures.py`.

    Returns:
        Columns model, structure, multiple (missing for ragged widths), ratio,
        achieved_ratio and delta_nll, in the order of the benchmark.
    """
    columns = ["model", "structure", "multiple", "ratio", "achieved_ratio", "delta_nll"]
    return measured[columns].astype({"multiple": "Int64"})


@styled
def plot_structures(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Lines over the multiple, ragged widths as a dashed line below them.

    Args:
        data: from `structures_data`, of one ratio.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    for name, rows in data.groupby("structure", sort=False):
        style = look(str(name))
        if name == RAGGED:
            ax.axhline(
                rows["delta_nll"].iloc[0],
                color=REFERENCE_GREY,
                linestyle="--",
                label=style.label,
            )
            continue
        ordered = rows.sort_values("multiple")
        ax.plot(
            ordered["multiple"].astype(int),
            ordered["delta_nll"],
            color=style.color,
            marker=style.marker,
            label=style.label,
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    multiples = data["multiple"].dropna().astype(int).unique().tolist()
    ax.set_xticks(multiples)
    ax.minorticks_off()
    ax.set_xlabel("widths’ multiple [atoms]")
    ax.set_ylabel(LABELS["delta_nll"])
    ax.set_ylim(bottom=0)
    return ax


@styled
def figure_structures(data: pd.DataFrame) -> Figure:
    """One panel for each ratio."""
    ratios = list(data["ratio"].drop_duplicates())
    figure, axes = panels(len(ratios))
    for ratio, ax in zip(ratios, axes, strict=True):
        plot_structures(data[data["ratio"].eq(ratio)], ax=ax)
        ax.set_title(f"{100 * ratio:g} % removed")
    share_legend(figure)
    return figure


def structures_table(data: pd.DataFrame) -> pd.DataFrame:
    """`structures_data` for reading: a row for each structure, Δloss at each ratio."""
    multiple = data["multiple"].map(lambda m: "any" if pd.isna(m) else str(m))
    wide = data.assign(multiple=multiple).pivot_table(
        index=["structure", "multiple"], columns="ratio", values="delta_nll", sort=False
    )
    wide.columns = [f"Δloss at {100 * ratio:g} % [nats] ↓" for ratio in wide.columns]
    return wide.reset_index().rename(columns={"multiple": "widths a multiple of"})
