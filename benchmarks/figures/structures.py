"""What structures cost: Δloss against the multiple that widths are restricted to."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from benchmarks.figures.looks import figure_by, look
from heapr_lab.figures.style import REFERENCE_LINE, own_axes, styled
from heapr_lab.importance.estimators import PER_TOKEN

RAGGED = "ragged"


def structures_data(measured: pd.DataFrame) -> pd.DataFrame:
    """Δloss in nats per token by structure, multiple and ratio.

    Args:
        measured: rows of `benchmarks/structures.py`.

    Returns:
        Columns model, structure, multiple (missing for ragged widths), ratio
        (requested), achieved_ratio, delta_nll, and excess_nll: delta_nll minus that of
        ragged widths with as many atoms.
    """
    columns = ["model", "structure", "multiple", "ratio", "achieved_ratio", "delta_nll"]
    excess = measured["delta_nll"] - measured["ragged_delta_nll"]
    frame = measured[columns].astype({"multiple": "Int64"})
    return frame.assign(excess_nll=excess)


@styled
def plot_structures(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """What a structure adds to Δloss, against the multiple; ragged widths are at 0.

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
            ax.axhline(0.0, label=style.label, **REFERENCE_LINE)
            continue
        ordered = rows.sort_values("multiple")
        multiples = ordered["multiple"].astype(int)
        ax.plot(multiples, ordered["excess_nll"], **style.keywords())
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.set_xticks(data["multiple"].dropna().astype(int).unique().tolist())
    ax.minorticks_off()
    ax.set_xlabel("widths’ multiple [atoms]")
    ax.set_ylabel(f"Δloss above ragged [{PER_TOKEN}] ↓")
    return ax


@styled
def figure_structures(data: pd.DataFrame) -> Figure:
    """One panel for each ratio that is asked for; a structure may remove more."""
    return figure_by(
        data, "ratio", plot_structures, title=lambda ratio: f"{ratio:.0%} asked for"
    )


def structures_table(data: pd.DataFrame) -> pd.DataFrame:
    """`structures_data` for readers: what each structure adds to Δloss at each ratio.

    Rows of ragged widths contain Δloss itself.
    """
    multiple = data["multiple"].map(lambda m: "any" if pd.isna(m) else str(m))
    shown = data["excess_nll"].where(data["structure"].ne(RAGGED), data["delta_nll"])
    wide = data.assign(multiple=multiple, shown=shown).pivot_table(
        index=["structure", "multiple"], columns="ratio", values="shown", sort=False
    )
    wide.columns = [f"{100 * ratio:g} % [{PER_TOKEN}] ↓" for ratio in wide.columns]
    wide = wide.reset_index().rename(columns={"multiple": "widths a multiple of"})
    added = wide["structure"].ne(RAGGED)
    wide.insert(2, "shown", added.map({True: "above ragged", False: "Δloss"}))
    return wide
