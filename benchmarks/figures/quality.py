"""What additions to the paper's method gain: their Δloss compared with HEAPr's."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures.looks import figure_by, look
from heapr_lab.experiments.answers import listed
from heapr_lab.figures.style import REFERENCE_LINE, own_axes, styled

PAPER = "heapr"
DRAWN = (
    "heapr + compensation",
    "fisher",
    "elimination + compensation",
    "compress",
)
"""Variants in the figure; the table has all."""
_USUAL = (0.4, 0.6)
"""Ratios at which most variants are measured."""
NOISE = 2.0
"""Standard errors over test windows; where HEAPr loses less, a quotient is of noise."""
_RUN = ["model", "calibration", "test", "seed", "ratio"]
_ACCURACIES = {
    "accuracy, seven tasks [%] ↑": "accuracy",
    "against dense [points] ↑": "against_dense",
    "against not healed [points] ↑": "against_unhealed",
}


def _pooled(rows: pd.DataFrame) -> float:
    """Mean Δloss of the rows ÷ HEAPr's; NaN where HEAPr's is within the noise."""
    error = np.sqrt(rows["paper_stderr"].pow(2).sum())
    if rows.empty or rows["paper"].sum() < NOISE * error:
        return float("nan")
    return float(rows["delta_nll"].sum() / rows["paper"].sum())


def models_data(measured: pd.DataFrame) -> pd.DataFrame:
    """Δloss of each variant ÷ HEAPr's on each model, calibrated and tested corpus.

    Where HEAPr loses less than the noise there is no quotient. Mixtures are left out.

    Args:
        measured: rows of `benchmarks/quality.py` on several models.

    Returns:
        The rows, with the columns `paper`, HEAPr's Δloss, its standard error
        `paper_stderr`, and `relative`.
    """
    rows = _beside_paper(measured).dropna(subset="paper")
    return rows[rows["calibration"].isin(rows["test"])].reset_index(drop=True)


def _beside_paper(measured: pd.DataFrame) -> pd.DataFrame:
    """The rows with HEAPr's Δloss in the same run, `paper`, and their `relative`.

    Where HEAPr loses less than the noise there is no quotient.
    """
    paper = measured[measured["variant"].eq(PAPER)]
    names = {"delta_nll": "paper", "delta_nll_stderr": "paper_stderr"}
    losses = paper[[*_RUN, *names]].rename(columns=names)
    rows = measured.merge(losses, on=_RUN, how="left")
    measurable = rows["paper"].ge(NOISE * rows["paper_stderr"])
    return rows.assign(relative=(rows["delta_nll"] / rows["paper"]).where(measurable))


def _calibrated(data: pd.DataFrame) -> pd.DataFrame:
    """Those rows of `models_data` that were tested on the corpus of the calibration."""
    return data[data["calibration"].eq(data["test"])]


def _on_other_text(data: pd.DataFrame) -> pd.DataFrame:
    """Those rows of `models_data` that were tested on a corpus not calibrated on."""
    return data[data["calibration"].ne(data["test"])]


@styled
def plot_models(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Δloss ÷ HEAPr's against the ratio, with 95 % intervals over test windows.

    Args:
        data: from `models_data`, of one model; corpora and seeds are pooled.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    ax.axhline(1.0, label=look(PAPER).label, **REFERENCE_LINE)
    data = _calibrated(data)
    for name in DRAWN:
        part = data[data["variant"].eq(name)]
        gains = [(ratio, *_gain(some)) for ratio, some in part.groupby("ratio")]
        if not gains:
            continue
        ratios, values, errors = np.transpose(gains)
        ax.errorbar(100 * ratios, values, yerr=errors, **look(name).keywords())
    ax.set_xlabel("atomic experts removed [%]")
    ax.set_ylabel("Δloss ÷ that of HEAPr ↓")
    ax.set_xlim(5, 85)
    ax.set_ylim(bottom=0)
    return ax


@styled
def figure_models(data: pd.DataFrame) -> Figure:
    """One panel for each model."""
    return figure_by(data, "model", plot_models)


def models_table(data: pd.DataFrame) -> pd.DataFrame:
    """`models_data` for readers: a row for each variant.

    Δloss ÷ HEAPr's, pooled over models, corpora and seeds (sum ÷ sum), and the largest
    quotient of any of them, with its model and corpus; then on text that nothing was
    calibrated on. A ratio at which HEAPr loses less than the noise on the mean has no
    quotient, and no column. Only runs that every variant has are pooled.
    """
    rows = []
    data = _of_every_variant(data)
    other = _on_other_text(data)
    data = _calibrated(data)
    for variant, part in data.groupby("variant", sort=False):
        row: dict[str, object] = {
            "variant": variant,
            "forward passes": part["passes"].max(),
        }
        for ratio, some in part.groupby("ratio"):
            row[f"{100 * ratio:g} % [× HEAPr] ↓"] = _pooled(some)
        row["worst at 40, 60 % [×]"] = _worst_where(part)
        elsewhere = other[other["variant"].eq(variant) & other["ratio"].isin(_USUAL)]
        row["other text, 40, 60 % [× HEAPr] ↓"] = _pooled(elsewhere)
        row["worst, other text, 40, 60 % [×]"] = _worst_where(elsewhere)
        rows.append(row)
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def _of_every_variant(data: pd.DataFrame) -> pd.DataFrame:
    n_variants = data.groupby(_RUN)["variant"].transform("nunique")
    return data[n_variants.eq(data["variant"].nunique())]


def models_pooled(measured: pd.DataFrame) -> str:
    """Over which models and draws the table pools, in words."""
    runs = _of_every_variant(measured[measured["calibration"].isin(measured["test"])])
    draws = listed(map(str, sorted(runs["seed"].unique())))
    return f"pooled: draw {draws} of {listed(runs['model'].unique())}"


def _worst_where(rows: pd.DataFrame) -> str | None:
    """The largest quotient at the usual ratios, with its model, corpus and ratio."""
    usual = rows[rows["ratio"].isin(_USUAL)].dropna(subset="relative")
    if usual.empty:
        return None
    worst = usual.loc[usual["relative"].idxmax()]
    where = f"{worst['model']}, {worst['test']}, {worst['ratio']:.0%}"
    return f"{worst['relative']:.2f} ({where})"


def _gain(rows: pd.DataFrame) -> tuple[float, float]:
    """Sum of Δloss ÷ HEAPr's, and half of its 95 % interval; NaN as `_pooled`."""
    if np.isnan(_pooled(rows)):
        return np.nan, np.nan
    # All seeds of a model and corpus are tested on the same windows.
    runs = rows.groupby(["model", "calibration", "test"])[["stderr", "paper"]].mean()
    error = 1.96 * np.sqrt(runs["stderr"].pow(2).sum()) / runs["paper"].sum()
    return _pooled(rows), error


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
