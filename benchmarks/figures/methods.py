"""Compression methods side by side: Δloss against the ratio, and against its cost."""

from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.figures import real
from benchmarks.figures.looks import look
from heapr_lab.experiments.answers import value_range
from heapr_lab.figures.curves import paper_table, plain_name
from heapr_lab.figures.style import (
    COLORS,
    PAPER_GREY,
    REFERENCE_GREY,
    name_points,
    own_axes,
    styled,
)
from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.tasks.paper_tasks import PAPER_TASKS

PAPER, OURS = "heapr", "compress"
_CORPUS = "pydocs"
"""The corpus that methods are fitted to."""
_LOSS = f"Δloss [{PER_TOKEN}] ↓"
_SECONDS = "fitting [CPU s] ↓"
_ROW = 0.165
"""Inches of a method in the figure."""


def methods_data(measured: pd.DataFrame) -> pd.DataFrame:
    """One row for each method and ratio, over models.

    Args:
        measured: rows of `benchmarks/methods.py`.

    Returns:
        Columns variant, group (what it compresses), ratio, achieved_ratio, n_models,
        n_refused (models on which it was refused), pooled and worst (over models, the
        mean and the largest Δloss on the corpus that was fitted to), stderr (of
        pooled, over test windows), other (pooled, on the other corpora), agreement,
        parameters_saved, routed_flops_saved, fit_seconds, fit_peak_bytes (means over
        models of what was measured, else NaN), and best: whether no method of the
        group has a lower Δloss, the mean over ratios.
    """
    keys = ["variant", "ratio"]
    rows = [_summary(part) for _, part in measured.groupby(keys, sort=False)]
    data = pd.DataFrame(rows)
    return data.assign(best=data["variant"].isin(_best_of_groups(data)))


def _summary(part: pd.DataFrame) -> dict[str, Any]:
    first = part.iloc[0]
    refused = part["refused"].notna() & part["refused"].ne("")
    done = part[~refused].dropna(axis=1, how="all")
    row: dict[str, Any] = {
        "variant": first["variant"],
        "group": first["kind"],
        "ratio": first["ratio"],
        "n_models": done["model"].nunique(),
        "n_refused": part.loc[refused, "model"].nunique(),
    }
    return row | _measures(done) if len(done) else row


def _measures(done: pd.DataFrame) -> dict[str, float]:
    """The numbers of rows that were not refused, of one method at one ratio."""
    losses = done[f"delta_nll {_CORPUS}"]
    # Draws of one model share its test windows, so that more of them leave the error.
    squares = done[f"stderr {_CORPUS}"].pow(2).groupby(done["model"]).mean()
    error = np.sqrt(squares.sum()) / len(squares)
    names = [name for name in done if str(name).startswith("delta_nll ")]
    others = [name for name in names if not name.endswith(f" {_CORPUS}")]
    derived = done.assign(
        other=done[others].mean(axis=1),
        agreement=done[f"agreement {_CORPUS}"],
        **{name: _column(done, name) for name in ("fit_seconds", "fit_peak_bytes")},
    )
    means = derived.mean(numeric_only=True)
    columns = (
        "achieved_ratio", "other", "agreement", "parameters_saved",
        "routed_flops_saved", "fit_seconds", "fit_peak_bytes",
    )  # fmt: skip
    pooled = {"pooled": losses.mean(), "worst": losses.max(), "stderr": error}
    return pooled | {name: means[name] for name in columns}


def _column(rows: pd.DataFrame, name: str) -> pd.Series:
    """A column that is only there if it was measured."""
    return rows[name] if name in rows else pd.Series(np.nan, index=rows.index)


def _best_of_groups(data: pd.DataFrame) -> list[str]:
    """The best method of each group, among those with all models and ratios."""
    means = _complete(data).groupby(["group", "variant"], sort=False)["pooled"]
    full = means.mean()[means.count() == data["ratio"].nunique()]
    return [names[1] for names in full.groupby("group").idxmin()]


def _complete(data: pd.DataFrame) -> pd.DataFrame:
    """The rows with all models, which alone can be compared."""
    return data[data["n_models"].eq(data["n_models"].max())]


def with_pretrained(data: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """`methods_data` with what each method loses on the pretrained MoE.

    All methods of a group are told at one ratio, that at which most of them were
    measured: tokens are routed to so many of its experts that few of them can go.

    Args:
        data: from `methods_data`.
        rows: of `benchmarks/real.py`.

    Returns:
        The data with the columns pretrained_ratio, pretrained (Δloss on windows of
        WikiText-2 that are the same for all) and pretrained_stderr; NaN for a method
        that was not measured at the ratio of its group.
    """
    groups = data.drop_duplicates("variant").set_index("variant")["group"]
    states = real.first_states(rows)
    states = states.assign(group=states["method"].map(groups)).dropna(subset="group")
    losses = (f"shared_delta_nll{part} {real.FITTED_TO}" for part in ("", "_stderr"))
    names = ("method", "ratio", *losses)
    named = ("variant", "pretrained_ratio", "pretrained", "pretrained_stderr")
    parts = []
    for _, part in states.groupby("group"):
        counts = part.groupby("ratio")["method"].nunique()
        most = counts[counts.eq(counts.max())].index.max()
        parts.append(part.loc[part["ratio"].eq(most), list(names)])
    measured = pd.concat(parts).rename(columns=dict(zip(names, named, strict=True)))
    return data.merge(measured, on="variant", how="left")


# --- one row for each method ----------------------------------------------------------


@styled
def figure_methods(data: pd.DataFrame) -> Figure:
    """A row for each method, best first of its kind: its Δloss, and the time it takes.

    At the ratio at which fitting was timed. A bar is the 95 % interval over test
    windows, a hollow point the worst model. Beside it the pretrained MoE, where kinds
    differ in the ratio.

    Args:
        data: from `with_pretrained`.
    """
    rows = _listed(data)
    figure, axes = plt.subplots(
        1, 3, figsize=(7, 1.1 + _ROW * rows["place"].max()), sharey=True,
        width_ratios=(2, 2, 1),
    )  # fmt: skip
    for row in rows.dropna(subset="pooled").itertuples():
        color = _color(row.variant, best=row.best)
        axes[0].plot([row.pooled, row.worst], 2 * [row.place], color=color, alpha=0.5)
        axes[0].plot(row.worst, row.place, "o", color=color, markerfacecolor="white")
        pairs = ((row.pooled, row.stderr), (row.pretrained, row.pretrained_stderr))
        for ax, (loss, stderr) in zip(axes, pairs, strict=False):
            ax.errorbar(loss, row.place, xerr=1.96 * stderr, marker="o", color=color)
        axes[2].plot(row.fit_seconds, row.place, marker="o", color=color)
    for ax, label in zip(axes, (_LOSS, _LOSS, _SECONDS), strict=True):
        _use_log(ax, "x")
        ax.set_xlabel(label)
    axes[0].set_title(
        f"lab models, {rows['ratio'].max():.0%} removed:\nmean, and worst (○)"
    )
    axes[1].set_title(f"{real.MODEL}, {_ratios(rows)}")
    axes[2].set_title("time of\nfitting")
    axes[0].set_yticks(rows["place"], rows["variant"])
    axes[0].invert_yaxis()
    for tick, row in zip(axes[0].get_yticklabels(), rows.itertuples(), strict=True):
        is_kind = np.isnan(row.pooled)
        tick.set_color("#222222" if is_kind else _color(row.variant, best=row.best))
        tick.set_fontweight("bold" if is_kind else "normal")
    return figure


def _listed(data: pd.DataFrame) -> pd.DataFrame:
    """The rows of the figure with their `place`, below a row for each kind."""
    rows = _complete(data).dropna(subset="fit_seconds")
    rows = rows.sort_values("pooled")
    kinds = list(rows["group"].drop_duplicates())
    blocks = [
        block
        for kind in kinds
        for block in (pd.DataFrame({"variant": [kind]}), rows[rows["group"].eq(kind)])
    ]
    listed = pd.concat(blocks, ignore_index=True)
    return listed.assign(place=range(len(listed)))


def _ratios(rows: pd.DataFrame) -> str:
    """What was removed of the pretrained MoE: most of all kinds, and less of some."""
    measured = rows.dropna(subset="pretrained_ratio")
    kinds = measured.groupby("pretrained_ratio")["group"].unique()
    texts = [
        f"{ratio:.0%} ({', '.join(kinds[ratio])})" for ratio in sorted(kinds.index)
    ]
    most = f"{kinds.index.max():.0%} removed" if len(kinds) else ""
    return ";\n".join([most, *texts[:-1]])


def _color(name: str, *, best: bool) -> str:
    """The colour of a few methods is their own, that of most is grey."""
    if name in (PAPER, OURS):
        return look(name).color
    return COLORS[2] if best else PAPER_GREY


def _use_log(ax: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5."""
    ax.set(**{f"{which}scale": "log"})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


# --- Δloss against cost ---------------------------------------------------------------


def method_costs_data(measured: pd.DataFrame) -> pd.DataFrame:
    """What fitting takes, and what it gains, at the ratio that was timed.

    Args:
        measured: rows of `benchmarks/methods.py`.

    Returns:
        Columns variant, group, ratio, fit_seconds, fit_peak_bytes, pooled, best, and
        efficient: whether no other method has less Δloss in less time.
    """
    columns = [
        "variant", "group", "ratio", "fit_seconds", "fit_peak_bytes", "pooled", "best",
    ]  # fmt: skip
    rows = _complete(methods_data(measured))
    rows = rows.dropna(subset=["fit_seconds", "pooled"])[columns]
    rows = rows.sort_values(["fit_seconds", "pooled"], ignore_index=True)
    before = rows["pooled"].cummin().shift(fill_value=np.inf)
    return rows.assign(efficient=rows["pooled"] < before)


@styled
def plot_method_costs(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Δloss against seconds of fitting; those on the Pareto front are joined and named.

    Args:
        data: from `method_costs_data`.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    ax = own_axes(ax)
    front = data[data["efficient"]]
    ax.step(
        front["fit_seconds"],
        front["pooled"],
        where="post",
        color=REFERENCE_GREY,
        linewidth=1,
        label="Pareto front",
    )
    names = {}
    for row in data.itertuples():
        color = _color(row.variant, best=row.best)
        face = color if row.efficient else "white"
        point = (row.fit_seconds, row.pooled)
        ax.plot(*point, marker="o", color=color, markerfacecolor=face, markersize=4)
        if row.efficient or row.best or row.variant in (PAPER, OURS):
            names[row.variant] = point
    _use_log(ax, "x")
    _use_log(ax, "y")
    name_points(ax, names)
    ax.set_xlabel(_SECONDS)
    ax.set_ylabel(f"mean of models\n{_LOSS}")
    ax.set_title(f"{data['ratio'].iloc[0]:.0%} removed" if len(data) else "")
    ax.legend()
    return ax


# --- tables ---------------------------------------------------------------------------


def methods_table(data: pd.DataFrame) -> pd.DataFrame:
    """`with_pretrained` for readers: a row for each method, the best of a group first.

    The columns after the ratios are of the ratio at which fitting was timed. A ratio
    that some model refuses has no value.
    """
    data = data.assign(incomplete=~data.index.isin(_complete(data).index))
    timed = data.loc[data["fit_seconds"].notna(), "ratio"]
    at = timed.iloc[0] if len(timed) else data["ratio"].max()
    rows = []
    for name, part in data.groupby("variant", sort=False):
        by_ratio = part[~part["incomplete"]].set_index("ratio")
        row: dict[str, Any] = {"compresses": part["group"].iloc[0], "method": name}
        for ratio in sorted(data["ratio"].unique()):
            loss = by_ratio["pooled"].get(ratio, np.nan)
            row[f"Δloss at {ratio:.0%} [{PER_TOKEN}] ↓"] = loss
        row["refused by, models"] = int(part["n_refused"].max())
        if at in by_ratio.index:
            row |= _more(by_ratio.loc[at], f"at {at:.0%}")
        rows.append(row)
    table = pd.DataFrame(rows)
    order = ["compresses", f"Δloss at {at:.0%} [{PER_TOKEN}] ↓"]
    return table.sort_values(order, kind="stable", ignore_index=True)


def _more(row: pd.Series, at: str) -> dict[str, Any]:
    return {
        f"± standard error {at}": row["stderr"],
        f"worst model {at} ↓": row["worst"],
        f"other corpora {at} ↓": row["other"],
        f"removed of {real.MODEL} [%]": 100 * row["pretrained_ratio"],
        f"Δloss of {real.MODEL} ↓": row["pretrained"],
        "same next token [%] ↑": 100 * row["agreement"],
        "parameters saved [%] ↑": 100 * row["parameters_saved"],
        "routed FLOPs saved [%] ↑": 100 * row["routed_flops_saved"],
        "fitting [CPU s] ↓": row["fit_seconds"],
        "memory of fitting [MB] ↓": row["fit_peak_bytes"] / 1e6,
    }


def twins_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/method_twins.py` for readers, with what each quotient is."""
    names = {
        "seconds": "fitting [CPU s]",
        "other_seconds": "fitting of the other [CPU s]",
        "ratio": "÷ the other ↓",
        "same": "the same is found",
    }
    return rows.rename(columns=names)


def published_table() -> pd.DataFrame:
    """The paper's rows on the methods that it compares, marked as published.

    Columns source, model, ratio, method, perplexity (WikiText-2), accuracy (the mean of
    the seven tasks; NaN where the paper omits one), and relative, the perplexity
    divided by the dense model's.
    """
    table = paper_table("main_results")
    perplexity = table["wikitext2_ppl"].astype(float)
    dense = table[table["method"].eq("Original")].set_index("model")["wikitext2_ppl"]
    tasks = table[list(PAPER_TASKS)].astype(float)
    return pd.DataFrame(
        {
            "source": "published, not measured here",
            "model": table["model"],
            "ratio": table["ratio"],
            "method": table["method"],
            "perplexity": perplexity,
            "accuracy": tasks.mean(axis=1, skipna=False),
            "relative": perplexity / table["model"].map(dense.astype(float)),
        }
    )


def rankings_table(data: pd.DataFrame) -> pd.DataFrame:
    """The order of methods in the paper beside that in `methods_data`.

    One row for each published model and ratio and each method that was measured here:
    its published perplexity divided by the dense model's, its Δloss here at the nearest
    ratio, both ranks among these methods (1 is best), and whether they agree.
    """
    ours = {plain_name(name): name for name in data["variant"]}
    ratios = np.sort(data["ratio"].unique())
    tables = []
    complete = _complete(data)
    for _, rows in published_table().query("ratio > 0").groupby(["model", "ratio"]):
        nearest = ratios[np.abs(ratios - rows["ratio"].iloc[0]).argmin()]
        at = complete[complete["ratio"].eq(nearest)]
        losses = at.set_index("variant")["pooled"]
        names = rows["method"].map(plain_name).map(ours)
        known = rows.assign(name=names)[names.isin(losses.index)]
        if len(known) > 1:
            known = known.assign(here=losses.loc[known["name"]].to_numpy())
            tables.append(_ranked(known, nearest))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _ranked(known: pd.DataFrame, nearest: float) -> pd.DataFrame:
    ranks = {name: known[name].rank().astype(int) for name in ("relative", "here")}
    return pd.DataFrame(
        {
            "published model": known["model"],
            "published ratio": known["ratio"],
            "method": known["name"],
            "published perplexity ÷ dense ↓": known["relative"],
            "rank there": ranks["relative"],
            "ratio here": nearest,
            "Δloss here ↓": known["here"],
            "rank here": ranks["here"],
            "same rank": ranks["relative"].eq(ranks["here"]),
        }
    )


_MERGING = {
    "hc-smoe": "merging, HC-SMoE",
    "random-groups": "merging random groups",
    "reap": "dropping, REAP",
    "random": "removing random atoms",
}


def similarity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """How alike the experts are, model by model: means over layers and their range.

    Args:
        rows: of `benchmarks/similarity.py`.
    """
    cosines = {
        "weights_cosine": "cosine of two experts' weights",
        "outputs_cosine": "of their outputs",
    }
    table = {}
    for model, part in rows.groupby("model", sort=False):
        texts = {
            said: f"{part[name].mean():.3f} ({value_range(part[name], '.3f')})"
            for name, said in cosines.items()
        }
        table[model] = {"experts": part["n_experts"].iloc[0]} | texts
    return pd.DataFrame(table).T.rename_axis("model").reset_index()


def merging_table(
    rows: pd.DataFrame, measured: pd.DataFrame, *, ratio: float
) -> pd.DataFrame:
    """`similarity_table`, with what merging, dropping and random atoms lose at a ratio.

    Args:
        rows: of `benchmarks/similarity.py`.
        measured: of `benchmarks/methods.py`.
        ratio: share of the routed experts' parameters that is removed.
    """
    at = measured[measured["ratio"].eq(ratio) & measured["variant"].isin(_MERGING)]
    losses = at.pivot_table(index="model", columns="variant", values="delta_nll pydocs")
    losses = losses[list(_MERGING)].rename(columns=_MERGING).round(3)
    losses.index = losses.index.str.removesuffix(" model")
    return similarity_table(rows).merge(losses, on="model")
