"""A model with one part in memory: memory, and time by stage."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures.looks import HATCHES
from heapr_lab.figures.style import (
    COLORS,
    REFERENCE_GREY,
    figure_of,
    own_axes,
    styled,
)

_MEMORY = {
    "checkpoint_bytes": "checkpoint on disk",
    "peak_bytes": "process at its peak",
}
_STAGES = {
    "identity": "hash of the weights",
    "scores": "scores",
    "losses": "losses: dense, masked, pruned",
    "pruning": "pruning the files",
}
"""What is timed."""
_LOSSES = ["loss", "masked loss", "pruned loss"]
_AXES = {"memory": "memory [GB]", "time": "time [s] ↓"}
_COLORS = {"memory": (REFERENCE_GREY, "#222222"), "time": COLORS}


def streaming_data(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/streaming.py` as one number a row.

    Args:
        measured: model, way, checkpoint_bytes, peak_bytes, and the seconds of each
            stage.

    Returns:
        Columns run, quantity ("memory" or "time"), part and value, in GB or seconds.
    """
    run = measured["model"] + ", " + measured["way"]
    memory = measured[list(_MEMORY)].rename(columns=_MEMORY) / 1e9
    times = measured.assign(losses=measured[_LOSSES].sum(axis="columns"))
    times = times[list(_STAGES)].rename(columns=_STAGES)
    frames = [
        frame.assign(run=run, quantity=quantity).melt(
            ["run", "quantity"], var_name="part"
        )
        for quantity, frame in (("memory", memory), ("time", times))
    ]
    return pd.concat(frames, ignore_index=True)


@styled
def plot_streaming(
    data: pd.DataFrame, *, quantity: str, ax: Axes | None = None
) -> Axes:
    """Bars of each run: memory side by side, or the times of its stages end to end.

    Args:
        data: from `streaming_data`.
        quantity: "memory" or "time".
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    bars = data[data["quantity"].eq(quantity)]
    values = bars.pivot(index="run", columns="part", values="value")
    runs, parts = (list(bars[name].drop_duplicates()) for name in ("run", "part"))
    rows, left = np.arange(len(runs), dtype=float), np.zeros(len(runs))
    ax = own_axes(ax)
    height = 0.8 / len(parts) if quantity == "memory" else 0.6
    for number, part in enumerate(parts):
        wide = values.loc[runs, part].to_numpy(dtype=float)
        shift = (number - (len(parts) - 1) / 2) * height
        places = rows + shift if quantity == "memory" else rows
        ax.barh(
            places, wide, height, left, color=_COLORS[quantity][number], label=part,
            hatch=HATCHES[number] if quantity == "time" else "", edgecolor="white",
        )  # fmt: skip
        left = left + wide if quantity == "time" else left
    ax.set_yticks(rows, runs)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(_AXES[quantity])
    return ax


@styled
def figure_streaming(data: pd.DataFrame) -> Figure:
    """Memory beside time by stage."""

    def draw(quantity: str, ax: Axes) -> None:
        plot_streaming(data, quantity=quantity, ax=ax)
        if quantity != "memory":
            ax.set_yticklabels([])

    return figure_of(_AXES, draw, height=2.2)


def streaming_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/streaming.py` for readers."""
    gigabytes = ["checkpoint_bytes", "peak_bytes", "bytes_read"]
    named = {
        "model": "model",
        "way": "layers",
        "tokens": "tokens",
        "checkpoint_bytes": "checkpoint [GB]",
        "peak_bytes": "peak memory [GB] ↓",
        "bytes_read": "read [GB]",
        "scores": "scores [s] ↓",
        "waits": "of it reading",
        "loss": "loss [s] ↓",
        "nll": "loss [nats per token]",
        "masked nll": "of a mask",
        "pruned nll": "of the pruned files",
    }
    shown = measured.assign(**{name: measured[name] / 1e9 for name in gigabytes})
    shown["waits"] = shown["reading"] / shown["scores"]
    return shown[list(named)].rename(columns=named)
