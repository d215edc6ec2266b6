"""What pruning costs a pretrained model, in absolute numbers."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures.looks import look
from heapr_lab.experiments.answers import value_range
from heapr_lab.experiments.claims import RIVALS
from heapr_lab.experiments.intervals import (
    Interval,
    accuracy_difference,
    interval_of,
    loss_difference,
    state,
)
from heapr_lab.figures import style
from heapr_lab.figures.style import (
    LABELS,
    REFERENCE_LINE,
    Look,
    figure_of,
    own_axes,
    show_percent,
    styled,
)
from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.tasks.paper_tasks import GUESSING, MEAN, task_summary
from heapr_lab.text.calibration_spec import spread

_NAMES = {
    "model": "model",
    "method": "method",
    "ratio": "atoms removed",
    "parameters_saved": "parameters removed",
    "fitted_to": "calibrated on",
    "seed": "draw",
}
MODEL = "smolmoe"
"""The pretrained MoE; `smollm2` is a dense model as one expert a layer."""
DEFAULT = "compress"
FITTED_TO = "wikitext2"
FRONT_RATIOS = (0.2, 0.25, 0.4)
FRONT_TEXT = f"{FITTED_TO}, 128 windows"
"""The ratios of the table in README.md, and what its methods are calibrated on."""
_BESIDES = ("heapr-l", "camera-p", "reap", *RIVALS)
"""What `main_table` has besides HEAPr and the default."""
TEXTS = {name: style.look(name).label for name in (FITTED_TO, "ptb", "c4")}
"""The corpus that is calibrated on, and the others, by the names of figures."""
LOSSES = {name: f"Δloss, {text} [{PER_TOKEN}] ↓" for name, text in TEXTS.items()}
_ACCURACY = "mean accuracy ↑"
ACCURACY = "mean accuracy of seven ↑"
"""What `apart` compares."""


def real_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Every state of `benchmarks/real.py`, best mean accuracy first at each ratio.

    Losses are in nats per token, less those of the dense model, on windows spread over
    each corpus, which are the same for all; ± is one standard error.
    """
    order = ["model", "ratio", "method", "fitted_to", "seed"]
    rows = rows.sort_values(order, kind="stable", ignore_index=True)
    shares = ["ratio", "parameters_saved"]
    table = rows[list(_NAMES)].rename(columns=_NAMES)
    table[[_NAMES[name] for name in shares]] = rows[shares].map("{:.1%}".format)
    for corpus in _measured(rows, "perplexity "):
        names = (f"shared_delta_nll{part} {corpus}" for part in ("", "_stderr"))
        losses = with_error(rows, *names, form="{:.3f}")
        table[f"Δloss {corpus} ↓"] = losses.where(rows["method"].ne("dense"), "–")
    table["mean accuracy of seven ↑"] = with_error(rows, "accuracy", "accuracy_stderr")
    table["minus HEAPr's, item by item ↑"] = with_error(
        rows, "against_heapr", "against_heapr_stderr"
    )
    for task in _measured(rows, "accuracy "):
        table[f"{task} ↑"] = rows[f"accuracy {task}"].map("{:.1%}".format)
    table["items of a task"] = rows["items"]
    table["of them HEAPr's"] = _items_of_heapr(rows)
    return table


def _items_of_heapr(rows: pd.DataFrame) -> "pd.Series[str]":
    """On how many items of a task the method is compared with HEAPr."""
    keys = ["model", "ratio", "fitted_to", "seed"]
    heapr = rows[rows["method"].eq("heapr")].set_index(keys)["items"]
    both = [
        min(row["items"], heapr.get(tuple(row[keys]), 0)) for _, row in rows.iterrows()
    ]
    alone = rows["against_heapr"].isna()
    return pd.Series(both, index=rows.index).astype(str).where(~alone, "–")


def first_states(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the pretrained MoE, calibrated on the first draw of WikiText-2."""
    return rows[of_model(rows) & rows["fitted_to"].eq(FITTED_TO)]


def front_states(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of README.md's table: HEAPr, the default, and the dense model."""
    table = rows[of_model(rows)]
    shown = table["method"].isin([DEFAULT, "heapr"]) & table["ratio"].isin(FRONT_RATIOS)
    shown &= table["fitted_to"].eq(FRONT_TEXT)
    return table[shown | table["method"].eq("dense")]


def of_model(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows are of the pretrained MoE and the first draw of calibration text."""
    return rows["model"].eq(MODEL) & rows["seed"].eq(0)


def real_front_table(
    rows: pd.DataFrame, windows: pd.DataFrame, items: pd.DataFrame
) -> pd.DataFrame:
    """Perplexity and mean accuracy of the pretrained MoE, in absolute numbers.

    A row for the dense model and for each ratio, method by method; the last one is of
    guessing. All are of the windows and items that every one of them has.

    Args:
        rows: of `benchmarks/real.py`.
        windows: the losses beside them.
        items: the answers beside them.
    """
    front = front_states(rows).sort_values(["ratio", "method"], key=_in_order)
    windows, items = (of_all(front_states(frame)) for frame in (windows, items))
    lines = [
        {
            "atoms removed": f"{row['ratio']:.0%}",
            "parameters removed": f"{row['parameters_saved']:.1%}",
            "method": {"heapr": "HEAPr"}.get(row["method"], row["method"]),
            **_perplexities(state(windows, row["method"], row["ratio"])),
            **_accuracy(state(items, row["method"], row["ratio"])),
        }
        for row in front.to_dict("records")
    ]
    lines.append({"method": "guessing", _ACCURACY: f"{GUESSING:.1%}"})
    return pd.DataFrame(lines).fillna("–")


def _perplexities(windows: pd.DataFrame) -> dict[str, str]:
    losses = windows.groupby("corpus", sort=False)["nll"].mean()
    return {
        f"perplexity {name} ↓": f"{math.exp(nll):.1f}" for name, nll in losses.items()
    }


def _accuracy(items: pd.DataFrame) -> dict[str, str]:
    value, error = task_summary(items).set_index("task").loc[MEAN, ["value", "stderr"]]
    return {_ACCURACY: f"{value:.1%} ± {error:.1%}"}


def of_all(rows: pd.DataFrame) -> pd.DataFrame:
    """The windows or items that every state has, so that they can be compared."""
    n_states = rows.groupby(["method", "ratio"]).ngroups
    unit = ["corpus", "window"] if "window" in rows else ["task", "item"]
    return rows[rows.groupby(unit)["method"].transform("size").eq(n_states)]


def _in_order(column: "pd.Series[Any]") -> "pd.Series[Any]":
    return column.ne("heapr") if column.name == "method" else column


def measured_on(windows: pd.DataFrame, items: pd.DataFrame) -> str:
    """What the numbers of `real_front_table` are of, in a sentence."""
    windows, items = (of_all(front_states(frame)) for frame in (windows, items))
    n_windows = windows.groupby("corpus", sort=False)["window"].nunique()
    n_items = items.groupby("task")["item"].nunique()
    return (
        f"Perplexity of {value_range(n_windows, 'd')} windows of 512 tokens, spread "
        "evenly over each test split; the paper's seven tasks, "
        f"{value_range(n_items, 'd')} items each; the same for all rows. ± is one "
        "standard error."
    )


def compared_on(rows: pd.DataFrame, losses: pd.DataFrame, calibration: str) -> str:
    """What comparisons of methods on the pretrained MoE are of, in words.

    Args:
        rows: of `benchmarks/real.py`.
        losses: those of each window, from the file beside them.
        calibration: the windows that methods are fitted to.
    """
    states = first_states(rows)
    counts = states["windows"].str.split(", ").explode().astype(int)
    losses = losses[losses["model"].eq(MODEL)]
    shares = ", ".join(
        f"{share_covered(part, counts.min()):.0%} on {corpus}"
        for corpus, part in losses.groupby("corpus", sort=False)
    )
    return (
        f"Comparisons on `smolmoe` are of methods calibrated on {calibration} of "
        "WikiText-2, on the windows and items that both have: "
        f"{value_range(counts, 'd')} windows of 512 tokens, spread evenly over a test "
        f"split, and {value_range(states['items'], 'd')} items of a task. Of the pairs "
        f"of states measured on whole splits, the 95 % interval over {counts.min()} "
        f"windows contains the difference over all in {shares}."
    )


def share_covered(losses: pd.DataFrame, n: int) -> float:
    """How often the interval over some windows has the difference over all.

    Args:
        losses: columns window, nll and those of a state, of one corpus.
        n: how many windows, spread over the split, the interval is over.

    Returns:
        The share of the pairs of states of which all windows were measured; NaN if
        there are none.
    """
    state = ["method", "ratio", "fitted_to", "seed"]
    wide = losses.pivot_table("nll", index="window", columns=state).dropna(axis=1)
    within = []
    for one, other in itertools.combinations(wide.columns, 2):
        gaps = (wide[one] - wide[other]).to_numpy()
        some = interval_of(gaps[spread(len(gaps), n)])
        within.append(some.low <= gaps.mean() <= some.high)
    return float(np.mean(within)) if within else math.nan


def tested_on(rows: pd.DataFrame) -> str:
    """Calibration, windows and items: where states are compared, and of each model."""
    texts = rows.loc[rows["method"].ne("dense"), "fitted_to"]
    text = f"here {texts.iloc[0]}" if texts.nunique() == 1 else ""
    shared = rows["windows"].nunique() > 1 and (
        f"Δloss on {fewest_windows(rows)} windows of 512 tokens, spread over each "
        "corpus, the same for all"
    )
    models = "; ".join(
        f"{model}: perplexity on {_windows(part)} of 512 tokens, {_items(part)}"
        for model, part in rows.groupby("model")
    )
    return "; ".join(filter(None, [text, shared, models]))


def fewest_windows(rows: pd.DataFrame) -> int:
    """How many test windows of a corpus every state has."""
    return int(rows["windows"].str.split(", ").explode().astype(int).min())


def _windows(rows: pd.DataFrame) -> str:
    counts = rows["windows"].str.split(", ", expand=True).astype(int)
    spans = (value_range(counts[corpus], "d") for corpus in counts)
    return f"{' / '.join(spans)} windows"


def _items(rows: pd.DataFrame) -> str:
    same = rows["items"].nunique() == 1
    how = "the same for all" if same else "each set contained in the larger ones"
    items = value_range(rows["items"], "d")
    return f"the paper's seven tasks, {items} items each, {how}"


# --- the paper's main table -------------------------------------------------------


def main_table(
    rows: pd.DataFrame, windows: pd.DataFrame, items: pd.DataFrame
) -> pd.DataFrame:
    """The paper's main table on the pretrained MoE, of whole splits alone.

    The method with the lowest perplexity first at each ratio. Differences to HEAPr at
    the same ratio are paired, with 95 % intervals.

    Args:
        rows: of `benchmarks/real.py`.
        windows: the losses beside them.
        items: the answers beside them.
    """
    states = first_states(rows)
    dense = states[states["method"].eq("dense")].iloc[0]
    whole = states["windows"].eq(dense["windows"]) & states["items"].eq(dense["items"])
    named = states["method"].isin(["dense", "heapr", DEFAULT, *_BESIDES])
    corpora = _measured(states, "perplexity ")
    states = states[whole & named].sort_values(["ratio", f"perplexity {corpora[0]}"])
    windows, items = first_states(windows), first_states(items)

    def minus_heapr(method: str, ratio: float) -> dict[str, str]:
        if method in ("dense", "heapr"):
            return {}
        return said(apart(windows, items, (method, "heapr"), ratio))

    table = pd.DataFrame(
        {"atoms removed": f"{row['ratio']:.1%}", "method": row["method"]}
        | {f"{name} ↓": f"{row[f'perplexity {name}']:.1f}" for name in corpora}
        | {
            _ACCURACY: f"{row['accuracy']:.1%} ± {row['accuracy_stderr']:.1%}",
            **minus_heapr(row["method"], row["ratio"]),
        }
        for row in states.to_dict("records")
    )
    columns = (*LOSSES.values(), ACCURACY)
    names = {name: f"minus HEAPr's: {name}" for name in columns}
    return table.fillna("–").rename(columns=names)


def apart(
    windows: pd.DataFrame, items: pd.DataFrame, pair: tuple[str, str], ratio: float
) -> dict[str, Interval | None]:
    """What the first of two methods loses and answers more than the second.

    Paired over the windows and items of both.

    Returns:
        By `LOSSES` and `ACCURACY`; None where there is nothing that both have.
    """
    gaps = {
        name: loss_difference(windows[windows["corpus"].eq(corpus)], *pair, ratio)
        for corpus, name in LOSSES.items()
    }
    return gaps | {ACCURACY: accuracy_difference(items, *pair, ratio)}


def said(gaps: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose differences, those of `apart`, are text; a dash for None."""
    forms = dict.fromkeys(LOSSES.values(), "+.3f") | {ACCURACY: "+.1%"}
    return dict(gaps) | {
        name: gaps[name].said(form) if gaps[name] else "–"
        for name, form in forms.items()
    }


# --- the figure -------------------------------------------------------------------


@styled
def plot_real(data: pd.DataFrame, *, shown: str, ax: Axes | None = None) -> Axes:
    """What the states of README.md's table lose on a corpus, or of the mean accuracy.

    Losses are on the windows that all states have.

    Args:
        data: rows of `benchmarks/real.py`.
        shown: a corpus, or "accuracy".
        ax: where to draw.
    """
    ax = own_axes(ax)
    states = front_states(data)
    losses = "shared_delta_nll" if states["windows"].nunique() > 1 else "delta_nll"
    value = "against_dense" if shown == "accuracy" else f"{losses} {shown}"
    error = value.replace("delta_nll", "delta_nll_stderr")
    error = "against_dense_stderr" if shown == "accuracy" else error
    ax.axhline(0.0, **REFERENCE_LINE)
    ends = {}
    for name in ("heapr", DEFAULT):
        rows = states[states["method"].isin([name, "dense"])].sort_values("ratio")
        ax.errorbar(
            rows["ratio"],
            rows[value].fillna(0.0),
            yerr=1.96 * rows[error].fillna(0.0),
            **look(name).keywords() | {"label": None},
        )
        ends[name] = rows["ratio"].iloc[-1], rows[value].iloc[-1]
    upper = max(ends, key=lambda name: ends[name][1])
    for name, end in ends.items():
        _name_line(ax, look(name), end, "bottom" if name == upper else "top")
    ax.set_xlabel(LABELS["ratio"])
    loss = f"Δloss [{PER_TOKEN}] ↓"
    ax.set_ylabel("minus dense [points] ↑" if shown == "accuracy" else loss)
    tasks = "mean accuracy of seven tasks"
    ax.set_title(tasks if shown == "accuracy" else style.look(shown).label)
    show_percent(ax.xaxis)
    if shown == "accuracy":
        show_percent(ax.yaxis)
    return ax


def _name_line(ax: Axes, shown: Look, end: tuple[float, float], va: str) -> None:
    """Write the name of a curve right of its end, in its colour."""
    ax.annotate(
        shown.label,
        end,
        xytext=(5, 0),
        textcoords="offset points",
        va=va,
        fontsize=8,
        color=shown.color,
    )


@styled
def figure_real(data: pd.DataFrame) -> Figure:
    """A panel for each corpus and one for the accuracy, with 95 % intervals."""
    panels = [*_measured(data, "perplexity "), "accuracy"]
    return figure_of(panels, lambda shown, ax: plot_real(data, shown=shown, ax=ax))


def _measured(rows: pd.DataFrame, prefix: str) -> list[str]:
    """The corpora or tasks that there are columns of."""
    return [
        name.removeprefix(prefix) for name in rows.columns if name.startswith(prefix)
    ]


def with_error(
    rows: pd.DataFrame, value: str, error: str, *, form: str = "{:.1%}"
) -> pd.Series:
    """Numbers and their standard errors as text; a dash where there are none."""
    pairs = zip(rows[value], rows[error], strict=True)
    formatted = f"{form} ± {form}".format
    texts = [formatted(v, e) if pd.notna(v) else "–" for v, e in pairs]
    return pd.Series(texts, index=rows.index)
