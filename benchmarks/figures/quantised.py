"""Pruned, quantised, or both: Δloss against the bytes of the checkpoint."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures.looks import figure_by, look
from heapr_lab.figures.style import LABELS, own_axes, show_percent, styled
from heapr_lab.importance.estimators import PER_TOKEN

_FLOATS = "bfloat16"
_KINDS = (_FLOATS, "int8", "int4")


def quantised_data(measured: pd.DataFrame) -> pd.DataFrame:
    """Δloss and size for each model, ratio and kind of the experts' weights.

    Args:
        measured: rows of `benchmarks/quantised.py`.

    Returns:
        Columns model, weights (bfloat16, int8 or int4), ratio, bytes of the files,
        size (bytes as a fraction of the dense model's in bfloat16), delta_nll and
        stderr in nats per token.
    """
    dense = measured[measured["ratio"].eq(0) & measured["weights"].eq(_FLOATS)]
    whole = measured["model"].map(dense.set_index("model")["bytes"])
    columns = ["model", "weights", "ratio", "bytes", "delta_nll", "stderr"]
    frame = measured[columns]
    frame.insert(4, "size", measured["bytes"] / whole)
    return frame


def _kinds_in(data: pd.DataFrame) -> list[str]:
    return [kind for kind in _KINDS if data["weights"].eq(kind).any()]


@styled
def plot_quantised(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Δloss ± one standard error against size, a curve for each kind of weights.

    Ratios increase along each curve from 0 on the right.

    Args:
        data: from `quantised_data`, of one model.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    for kind in _kinds_in(data):
        rows = data[data["weights"].eq(kind)].sort_values("ratio")
        error = rows["stderr"].fillna(0.0)
        ax.errorbar(
            rows["size"], rows["delta_nll"], yerr=error, **look(kind).keywords()
        )
    ax.set_xlabel("file size [% of dense] ↓")
    ax.set_ylabel(f"{LABELS['delta_nll']} ↓")
    show_percent(ax.xaxis)
    return ax


@styled
def figure_quantised(data: pd.DataFrame) -> Figure:
    """One panel for each model."""
    return figure_by(data, "model", plot_quantised)


def quantised_table(data: pd.DataFrame) -> pd.DataFrame:
    """`quantised_data` for readers: size and Δloss by ratio, a column for each kind."""
    kinds = _kinds_in(data)
    wide = data.pivot_table(
        index=["model", "ratio"],
        columns="weights",
        values=["size", "delta_nll"],
        sort=False,
    )
    table = wide.index.to_frame(index=False)
    table["ratio"] = 100 * table["ratio"]
    for kind in kinds:
        table[f"{kind}: size [%] ↓"] = 100 * wide["size", kind].to_numpy()
        name = f"{kind}: Δloss [{PER_TOKEN}] ↓"
        table[name] = wide["delta_nll", kind].to_numpy()
    return table.rename(columns={"ratio": "pruned [%]"})
