"""What benchmarks come to, in sentences of their numbers, for notebooks and pages."""

from collections.abc import Iterable

import pandas as pd

from benchmarks.figures.real import MODEL, of_all
from heapr_lab.experiments.answers import Answer, answer, listed, value_range
from heapr_lab.experiments.intervals import (
    UNDECIDED,
    accuracy_difference,
    loss_difference,
    loss_differences,
)


def quality(
    windows: pd.DataFrame, items: pd.DataFrame, default: str, corpus: str
) -> Answer:
    """What the default saves of HEAPr's loss on a pretrained model.

    Args:
        windows: the losses of its states, as `intervals.loss_difference` takes them,
            of which those count that all of the states compared have.
        items: their answers.
        default: the method that is compared with "heapr".
        corpus: the one that was calibrated on.
    """
    pair = (windows.loc[windows["method"].eq(n), "ratio"] for n in (default, "heapr"))
    ratios = sorted(set.intersection(*map(set, pair)))
    if not ratios:
        return answer(f"{default} has not been measured on a pretrained model.")
    windows = of_all(windows[windows["method"].isin([default, "heapr", "dense"])])
    same = windows["corpus"].eq(corpus)
    parts = {corpus: windows[same], "other text": windows[~same]}
    texts = {name: part for name, part in parts.items() if len(part)}
    tasks = {r: accuracy_difference(items, default, "heapr", r) for r in ratios}
    gaps = {ratio: gap for ratio, gap in tasks.items() if gap is not None}
    avoided = listed(
        f"{_avoided(part, default, ratios)} on {name}" for name, part in texts.items()
    )
    apart = sum(gap.verdict != UNDECIDED for gap in gaps.values())
    short = (
        f"On the pretrained MoE, {default} avoids {avoided} of the Δloss that HEAPr "
        f"has, where {listed(f'{ratio:.0%}' for ratio in ratios)} of the atoms are "
        f"removed; their accuracies differ by more than an interval at {apart} of "
        f"{len(gaps)} ratios."
    )
    losses = "; ".join(
        f"at {ratio:.0%} {_beside_heapr(part, default, ratio)} on {name}"
        for ratio in ratios
        for name, part in texts.items()
    )
    accuracies = "; ".join(
        f"at {ratio:.0%} {gap.said('+.1%')}" for ratio, gap in gaps.items()
    )
    more = [
        f"Δloss of {default} against that of HEAPr, in nats per token, with 95 % "
        f"intervals of the difference: {losses}.",
        f"Mean accuracy on the tasks minus HEAPr's: {accuracies or 'not measured'}.",
    ]
    return answer(short, more)


def _avoided(windows: pd.DataFrame, method: str, ratios: Iterable[float]) -> str:
    """The share of HEAPr's loss that a method does not have, over ratios.

    Where HEAPr's interval contains zero, there is none.
    """
    mine, heapr = (
        loss_differences(windows, name, "dense", ratios) for name in (method, "heapr")
    )
    measurable = [ratio for ratio in mine if heapr[ratio].low > 0]
    shares = [1 - mine[ratio].value / heapr[ratio].value for ratio in measurable]
    return value_range(pd.Series(shares), ".0%") if shares else "no share that is known"


def _beside_heapr(windows: pd.DataFrame, method: str, ratio: float) -> str:
    mine, heapr, apart = (
        loss_difference(windows, *pair, ratio)
        for pair in ((method, "dense"), ("heapr", "dense"), (method, "heapr"))
    )
    assert mine
    assert heapr
    assert apart
    interval = f"{apart.low:+.2f} to {apart.high:+.2f}"
    return f"{mine.value:.2f} against {heapr.value:.2f} ({interval})"


def methods(
    data: pd.DataFrame,
    rankings: pd.DataFrame,
    measured: pd.DataFrame,
    *,
    claim: str = "",
) -> Answer:
    """Which way to compress loses least, and where merging beats random atoms.

    Args:
        data: from `with_pretrained`.
        rankings: the paper's order beside ours.
        measured: rows of every model.
        claim: the paper's claim of its rivals, and its verdict.
    """
    ratio = 0.4 if 0.4 in set(data["ratio"]) else data["ratio"].median()
    at = data[data["ratio"].eq(ratio)]
    smaller = at[at["group"].ne("weights")]
    least, elsewhere = (
        smaller.loc[smaller[text].idxmin(), "variant"] for text in ("pooled", "other")
    )
    short = (
        f"At {ratio:.0%}, {least} loses least of the methods that leave fewer "
        f"parameters on the calibrated corpus, and {elsewhere} on the other corpora. "
        "Best of each kind, "
        f"Δloss in nats per token, mean of {int(at['n_models'].max())} models: "
        f"{_best_of_kinds(at, 'pooled')}; on the other corpora: "
        f"{_best_of_kinds(at, 'other')}. {_on_pretrained(at)}{_only_zeroes(at)}"
    )
    more = [_order(rankings), _where_merging_wins(measured, ratio)]
    return answer(" ".join(filter(None, [claim, short])), more)


def _best_of_kinds(at: pd.DataFrame, text: str) -> str:
    best = at.loc[at.groupby("group")[text].idxmin()].sort_values(text)
    return "; ".join(
        f"{row['group']} {row['variant']} {row[text]:.3f}"
        for row in best.to_dict("records")
    )


def _on_pretrained(at: pd.DataFrame) -> str:
    """The best of each kind on the pretrained MoE, the ratio of most kinds first."""
    measured = at.dropna(subset="pretrained").groupby("pretrained_ratio")
    texts = [
        f"where {ratio:.0%} is removed, {_best_of_kinds(part, 'pretrained')}"
        for ratio, part in reversed(list(measured))
    ]
    return f"On {MODEL}, {'; '.join(texts)}."


def _only_zeroes(at: pd.DataFrame) -> str:
    """Which methods set single weights to zero, and save no operations by it."""
    names = at.loc[at["group"].eq("weights"), "variant"]
    if names.empty:
        return ""
    return f" Setting single weights to zero ({listed(names)}) saves no operations."


def _order(rankings: pd.DataFrame) -> str:
    """How many of the paper's ranks are the same here, HEAPr's and all others."""
    if rankings.empty:
        return ""
    heapr = rankings["method"].eq("heapr")
    same = rankings["same rank"]
    return (
        f"HEAPr has the paper's rank in {same[heapr].sum()} of {heapr.sum()} of its "
        f"comparisons, the other methods in {same[~heapr].sum()} of {(~heapr).sum()}; "
        "the paper quotes their rows from other papers, with their calibration."
    )


def _where_merging_wins(measured: pd.DataFrame, ratio: float) -> str:
    """On which models merging beats random atoms, and on which dropping beats it."""
    rows = measured[measured["ratio"].eq(ratio)]
    losses = rows.pivot_table(
        index="model", columns="variant", values="delta_nll pydocs"
    )
    if not {"hc-smoe", "random"} <= {*losses.columns}:
        return ""
    losses = losses.dropna(subset=["hc-smoe", "random"])
    wins = losses["hc-smoe"] < losses["random"]
    sides = {"less": losses[wins], "more": losses[~wins]}
    text = ", and ".join(
        f"{word} on {_pairs(part)}" for word, part in sides.items() if len(part)
    )
    exceptions = losses.index[wins != losses.index.str.contains("upcycled")]
    return (
        f"Compared with removing random atoms, merging (HC-SMoE) loses {text}. It "
        "averages experts, so it should lose less where they began as copies of one "
        "(upcycled) and more where they were trained from scratch. Exceptions: "
        f"{listed(exceptions) if len(exceptions) else 'none'}.{_dropped(losses)}"
    )


def _dropped(losses: pd.DataFrame) -> str:
    """On which models dropping as many experts loses less than merging them."""
    drops = (
        losses[losses["reap"] < losses["hc-smoe"]] if "reap" in losses else losses[:0]
    )
    if drops.empty:
        return ""
    return (
        " Dropping as many experts (REAP) loses less than merging them on "
        f"{len(drops)} of {len(losses)} models: {_pairs(drops, beside='reap')}. Where "
        "dropping beats random atoms as well, a win of merging shows no gain from "
        "averaging."
    )


def _pairs(losses: pd.DataFrame, beside: str = "random") -> str:
    return listed(
        f"the {model} ({row['hc-smoe']:.3f} against {row[beside]:.3f})"
        for model, row in losses.iterrows()
    )
