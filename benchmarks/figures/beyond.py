"""Tables of what follows `compress`, and of what its solves cost."""

import pandas as pd

from benchmarks.figures.quality import MEASURABLE, PAPER
from benchmarks.figures.real import with_error

_ACCURACIES = {
    "accuracy, seven tasks [%] ↑": "accuracy",
    "against dense [points] ↑": "against_dense",
    "against not healed [points] ↑": "against_unhealed",
}

_SECONDS = "CPU time [s], minus what earlier rows measured"
"""Scores and sums are charged to the first row that needs them."""


def beyond_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/beyond.py` for readers: a row for each variant and ratio.

    Δloss ÷ that of HEAPr calibrated on the corpus, pooled over models (sum ÷ sum), and
    of the worst model where HEAPr loses at least 0.005 nats.
    """
    base = measured[measured["variant"].eq(PAPER)].set_index(["model", "ratio"])
    rows = []
    for (variant, ratio), part in measured.groupby(["variant", "ratio"], sort=False):
        models = part.set_index(["model", "ratio"])
        row: dict[str, object] = {"variant": variant, "removed": f"{ratio:.0%}"}
        row["models"] = len(models)
        for corpus in ("pydocs", "wikitext2"):
            losses, paper = (f[f"delta_nll {corpus}"] for f in (models, base))
            paper = paper.loc[losses.index]
            row[f"Δloss {corpus} [× HEAPr] ↓"] = losses.sum() / paper.sum()
            if corpus == "pydocs":
                row["worst model [×] ↓"] = (losses / paper)[paper > MEASURABLE].max()
        row[_SECONDS] = models["cpu_seconds"].mean()
        rows.append(row)
    return pd.DataFrame(rows).sort_values("removed", kind="stable", ignore_index=True)


def healing_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/healing.py` for readers: each ratio and amount of text."""
    ordered = measured.sort_values(["ratio", "windows"], ignore_index=True)
    rows = []
    for _, state in ordered.iterrows():
        row: dict[str, object] = {
            "model": state["model"],
            "removed": f"{state['ratio']:.0%}",
        }
        row["trained on [tokens]"] = f"{state['tokens']:,}"
        for corpus in ("wikitext2", "ptb", "c4"):
            row[f"perplexity {corpus} ↓"] = state[f"perplexity {corpus}"]
        for name, column in _ACCURACIES.items():
            value, error = state[column], state[f"{column}_stderr"]
            sign = "" if column == "accuracy" else "+"
            row[name] = f"{100 * value:{sign}.1f} ± {100 * error:.1f}"
        row["CPU time [s]"] = state["cpu_seconds"]
        rows.append(row)
    return pd.DataFrame(rows)


def widths_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/learned_widths.py` for readers, masks of scores first."""
    ordered = measured.sort_values(["model", "scores", "compensated", "epochs"])
    table = pd.DataFrame(
        {
            "model": ordered["model"],
            "scores": ordered["scores"],
            "removed": ordered["ratio"].map("{:.0%}".format),
            "widths": ordered["epochs"].map(
                lambda n: f"learned, {n} epochs" if n else "of the scores"
            ),
            "W_down": ordered["compensated"].map(
                {True: "compensated", False: "unchanged"}
            ),
        }
    )
    for corpus in ("wikitext2", "ptb", "c4"):
        columns = f"delta_nll {corpus}", f"stderr {corpus}"
        table[f"Δloss {corpus} ↓"] = with_error(ordered, *columns, form="{:.3f}")
    table[_SECONDS] = ordered["cpu_seconds"]
    return table


def solves_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/solves.py` for readers."""
    named = {
        "model": "model",
        "experts": "experts",
        "atoms": "atoms",
        "d_model": "d_model",
        "tokens": "tokens",
        "scores": "scores [s]",
        "elimination": "elimination [s]",
        "compensation": "compensation [s]",
        "compress ÷ scores": "passes and solves of compress ÷ scores ↓",
    }
    return measured[list(named)].rename(columns=named)
