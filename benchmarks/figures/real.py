"""What pruning costs a pretrained model, in absolute numbers."""

import numpy as np
import pandas as pd

_NAMES = {
    "model": "model",
    "method": "method",
    "ratio": "atoms removed",
    "parameters_saved": "parameters removed",
    "fitted_to": "calibrated on",
    "seed": "draw",
}
_FRONT = {
    "dense": (0.0,),
    "heapr": (0.2, 0.25, 0.4),
    "fisher + compensation": (0.25, 0.4),
}
"""The methods and ratios that README.md shows."""


def real_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Every state of `benchmarks/real.py`, best mean accuracy first at each ratio.

    Perplexities are of as many windows, and accuracies of as many items of each task,
    as the last columns say; ± is one standard error.
    """
    order = ["model", "ratio", "method", "fitted_to", "seed"]
    rows = rows.sort_values(order, kind="stable", ignore_index=True)
    shares = ["ratio", "parameters_saved"]
    table = rows[list(_NAMES)].rename(columns=_NAMES)
    table[[_NAMES[name] for name in shares]] = rows[shares].map("{:.1%}".format)
    for corpus in _measured(rows, "perplexity "):
        table[f"perplexity {corpus} ↓"] = rows[f"perplexity {corpus}"].map(
            "{:.2f}".format
        )
    table["mean accuracy of seven ↑"] = _with_error(rows, "accuracy", "accuracy_stderr")
    table["less HEAPr's, item by item ↑"] = _with_error(
        rows, "against_heapr", "against_heapr_stderr"
    )
    for task in _measured(rows, "accuracy "):
        table[f"{task} ↑"] = rows[f"accuracy {task}"].map("{:.1%}".format)
    table["windows of 512 tokens"] = rows["windows"]
    table["items of a task"] = rows["items"]
    return table


def real_front_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The states of `smolmoe` that a reader sees first, without single tasks."""
    first = rows["fitted_to"].eq("wikitext2") & rows["seed"].eq(0)
    pairs = zip(rows["method"], rows["ratio"], strict=True)
    shown = np.array([ratio in _FRONT.get(method, ()) for method, ratio in pairs])
    table = real_table(rows[first & rows["model"].eq("smolmoe") & shown])
    tasks = [f"{name} ↑" for name in _measured(rows, "accuracy ")]
    return table.drop(columns=["model", "calibrated on", "draw", *tasks])


def _measured(rows: pd.DataFrame, prefix: str) -> list[str]:
    """The corpora or tasks that there are columns of."""
    return [
        name.removeprefix(prefix) for name in rows.columns if name.startswith(prefix)
    ]


def _with_error(rows: pd.DataFrame, value: str, error: str) -> pd.Series:
    """Percentages and their standard errors as text; a dash where there are none."""
    pairs = zip(rows[value], rows[error], strict=True)
    return pd.Series(
        [f"{v:.1%} ± {e:.1%}" if pd.notna(v) else "–" for v, e in pairs],
        index=rows.index,
    )
