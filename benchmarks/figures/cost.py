"""Figure 9: what measuring the scores costs, in time and memory."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures.looks import HATCHES, look
from heapr_lab.errors import SpecError
from heapr_lab.experiments.answers import value_range
from heapr_lab.figures.curves import paper_table
from heapr_lab.figures.style import figure_of, own_axes, styled

MIB = 2**20
NOT_COMPARABLE = "paper, not comparable (other model, data and machine)"
_BASELINE = "plain"
_COLUMNS = [
    "source",
    "method",
    "model",
    "d_model",
    "d_inter",
    "n_experts",
    "seconds",
    "peak_bytes",
    "state_bytes",
    "times_baseline",
]
LABELS = {
    "seconds": "time [s] ↓",
    "peak_bytes": "peak memory [MiB] ↓",
    "state_bytes": "accumulated state [MiB] ↓",
}


def cost_data(costs: pd.DataFrame) -> pd.DataFrame:
    """Measured costs and the paper's, in seconds and bytes.

    Args:
        costs: rows of method, model, d_model, d_inter, n_experts, seconds, peak_bytes
            and state_bytes.

    Returns:
        The rows of `costs` with `source` "ours" and `times_baseline`, relative to a
        forward and backward pass of the model, then the paper's with `source` "paper".

    Raises:
        SpecError: the baseline was not measured on a model.
    """
    base = costs[costs["method"].eq(_BASELINE)].set_index("model")["seconds"]
    missing = sorted(set(costs["model"]) - set(base.index))
    if missing:
        raise SpecError(
            f"no row of baseline {_BASELINE!r} for {missing}: found methods "
            f"{sorted(set(costs['method']))}. Measure the baseline on them too."
        )
    times = costs["seconds"] / costs["model"].map(base)
    ours = costs.assign(source="ours", times_baseline=times)
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
    return pd.concat([ours, paper], ignore_index=True)[_COLUMNS]


def cost_said(data: pd.DataFrame) -> str:
    """What the scores cost beside plain passes and the paper's algorithm, in words.

    Args:
        data: from `cost_data`.
    """
    ours = data[data["source"].eq("ours")]
    seconds = ours.pivot(index="model", columns="method", values="seconds")

    def times(method: str, base: str) -> str:
        return f"{value_range(seconds[method] / seconds[base], '.2f')} ×"

    return (
        f"Scoring takes {times('one_pass', _BASELINE)} the time of transformers' "
        f"forward and backward pass, and {times('one_pass', 'plain_eager')} that of "
        "the same loop over experts without the sums; the paper's Algorithm 1, with a "
        f"matrix for each expert, takes {times('two_stage', _BASELINE)}"
    )


def cost_table(data: pd.DataFrame) -> pd.DataFrame:
    """`cost_data` for readers: seconds and MiB, the paper's rows marked as such."""
    ours = data["source"].eq("ours")
    return pd.DataFrame(
        {
            "method": [look(name).label for name in data["method"]],
            "model": data["model"],
            "d_model": data["d_model"].astype("Int64"),
            "d_inter": data["d_inter"].astype("Int64"),
            "experts": data["n_experts"].astype("Int64"),
            LABELS["seconds"]: data["seconds"],
            LABELS["peak_bytes"]: data["peak_bytes"] / MIB,
            LABELS["state_bytes"]: data["state_bytes"] / MIB,
            "time ÷ baseline [×] ↓": data["times_baseline"],
            "source": ["measured here" if here else NOT_COMPARABLE for here in ours],
        }
    )


@styled
def plot_cost(data: pd.DataFrame, *, quantity: str, ax: Axes | None = None) -> Axes:
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
        ax.barh(
            rows, values / scale, height=height, color=color, label=label,
            hatch=HATCHES[number % len(HATCHES)], edgecolor="white",
        )  # fmt: skip
    ax.set_yticks(range(len(models)), models)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(LABELS[quantity])
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


# --- on a GPU ---------------------------------------------------------------------

_WAYS = {
    "scores": "scores, the largest batch that fits",
    "scores, same batch": "scores, that batch at once",
    "scores, batch 1": "scores, a window at a time",
    "plain": "forward and backward, no statistics",
    "compress": "all of `compress` at 40 %",
    "two_stage": "the paper's Algorithm 1",
}
_STREAMED = "scores, a layer at a time from disk"


def gpu_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `benchmarks/gpu.py` on the paper's models.

    With `model`, and `way`, which says how it was scored.
    """
    part = rows["part"].str.partition(":")
    runs = rows.assign(model=part[2], way=rows["case"].map(_WAYS))
    runs["way"] = runs["way"].mask(part[0].eq("streamed"), _STREAMED)
    return runs[runs["n_layers"].notna()].reset_index(drop=True)


def gpu_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/gpu.py` for readers; a dash where memory ran out.

    A model that does not fit has its first layers, and its time in proportion.
    """
    runs = gpu_runs(rows)
    layers = runs[["n_layers", "of_layers"]].astype(int).astype(str)
    numbers = {
        "windows at once": runs["batch"],
        "time [s] ↓": runs["seconds"].round(1),
        "of all layers [s] ↓": runs["seconds_all_layers"].round(1),
        "memory [GB] ↓": (runs["peak_bytes"] / 1e9).round(1),
    }
    return pd.DataFrame(
        {
            "model": runs["model"],
            "layers": layers["n_layers"] + " of " + layers["of_layers"],
            "what": runs["way"],
            "sums": runs["sums"].where(runs["way"].str.startswith("scores"), "–"),
            **{name: said_or_dash(column) for name, column in numbers.items()},
            "device": runs["device"],
            "date": runs["date"],
        }
    )


def said_or_dash(column: "pd.Series[float]") -> "pd.Series[str]":
    """Numbers as text, a dash where there is none."""
    return column.map("{:g}".format, na_action="ignore").fillna("–")


def gpu_tested_on(rows: pd.DataFrame) -> str:
    """The tokens that were scored, what statistics add, and how the tests ended."""
    tokens = rows["n_tokens"].max()
    tests = rows[rows["part"].eq("tests")]
    passed, failed = (tests["outcome"].eq(word).sum() for word in ("passed", "failed"))
    layers = rows.pivot_table(index="case", columns="what", values="seconds")
    times = layers["experts, measured"] / layers["experts, plain"]
    return (
        f"random weights in bfloat16, {tokens:.0f} random tokens in windows of 2048; "
        f"the experts of a layer take {value_range(times, '.2f')} × the time with "
        f"statistics; of the tests marked `gpu` {passed} passed and {failed} did not"
    )


def solves_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/solves.py` for readers."""
    named = {
        "model": "model",
        "experts": "experts",
        "atoms": "atoms",
        "d_model": "d_model",
        "tokens": "tokens",
        "scores": "a pass of scores [s]",
        "sums": "of sums [s]",
        "losses": "of losses [s]",
        "elimination": "elimination [s]",
        "compensation": "compensation [s]",
        "compress ÷ scores": "compress ÷ scores ↓",
        "with HEAPr's mask": "where it returns HEAPr's mask ↓",
    }
    return measured[list(named)].rename(columns=named)
