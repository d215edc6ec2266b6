"""What the notebooks answer, in sentences of their numbers.

Most functions take the frames of one notebook and return its `Answer`. What was
found against the paper is said first; the paper's numbers are named as the paper's.
Notebooks about the paper's claims begin with `claims.answer_of`.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from heapr_lab.experiments.intervals import (
    AGREES,
    DISAGREES,
    UNDECIDED,
    UNTESTED,
    accuracy_difference,
    loss_difference,
    state,
)
from heapr_lab.figures.paper import paper_table
from heapr_lab.pruning.savings import at_context

_SAYS = {
    AGREES: "agrees",
    DISAGREES: "disagrees",
    UNDECIDED: "cannot decide",
    UNTESTED: "cannot test it",
}


class Prose(str):
    """Sentences that a notebook shows as text."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class Answer:
    """The answer to the question of a notebook."""

    short: Prose
    """What was found against the paper, if anything, and one or two sentences more."""
    more: tuple[str, ...] = ()

    def _repr_markdown_(self) -> str:
        return " ".join([self.short, *self.more])

    def __repr__(self) -> str:
        return self._repr_markdown_()


def answer(short: str, more: Sequence[str] = (), against: Sequence[str] = ()) -> Answer:
    """An `Answer`, of the sentences that are not empty."""
    first = " ".join(filter(None, [*against, short]))
    return Answer(Prose(first), tuple(filter(None, more)))


def value_range(values: "pd.Series[float]", form: str = ".3f") -> str:
    """The least and the largest value, or the only one.

    Example:
        >>> value_range(pd.Series([2.0, 1.0]), ".1f")
        '1.0 to 2.0'
    """
    low, high = values.min(), values.max()
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"


def listed(names: Iterable[object]) -> str:
    """Names as a list in a sentence.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    *first, last = [str(name) for name in names]
    return f"{', '.join(first)} and {last}" if first else last


def claim_in_words(row: Mapping[Hashable, str], model: str) -> str:
    """A row of `claims.claims` in two sentences; the second begins with a model."""
    paper = f" ({row['paper']})" if row["paper"] else ""
    return (
        f"A claim of the paper: {row['claim']}{paper}. {model} "
        f"**{_SAYS[row['verdict']]}**: {row['found']}."
    )


# --- the notebooks ----------------------------------------------------------------


def tour(
    results: pd.DataFrame, saved: "pd.Series[float]", losses: pd.DataFrame
) -> Answer:
    """What a quarter of the atoms costs and saves, on its own text and on other text.

    Args:
        results: evaluation rows of the dense model and of the pruned one.
        saved: a row of `Workbench.savings`.
        losses: from `paper.mask_losses`, the mask of the results first.
    """
    corpus = str(losses["mask"].iloc[0])
    values = results[results["metric"].eq("perplexity")]
    values = values.pivot(index="estimator", columns="dataset", values="value")
    dense, pruned = values.loc["dense", corpus], values.loc["heapr", corpus]
    published = value_range(published_rises(), "+.1%")
    short = (
        "Without the quarter of the atomic experts with the lowest scores, the model "
        f"has {saved['parameter_reduction']:.1%} fewer parameters and takes "
        f"{saved['flops_reduction']:.1%} fewer operations per token "
        f"({at_context(saved['seq_len'])}). Perplexity on held-out text of {corpus} "
        f"goes from {dense:.2f} to {pruned:.2f} ({pruned / dense - 1:+.1%}; the "
        f"paper's models on WikiText-2: {published})."
    )
    table = losses.pivot(index="mask", columns="dataset", values="delta_nll")
    return answer(short, [_on_other_text(table, corpus), _of_mixture(table, corpus)])


def published_rises() -> "pd.Series[float]":
    """Relative rises of WikiText-2 perplexity that the paper has for HEAPr, to 25 %."""
    pairs = published_pairs("wikitext2_ppl")
    rises: pd.Series[float] = pairs["HEAPr"] / pairs["Original"] - 1
    return rises


def published_pairs(column: str) -> pd.DataFrame:
    """What the paper has for each model, dense ("Original") and by HEAPr, to 25 %.

    Args:
        column: one of the paper's main table.
    """
    rows = paper_table("main_results").query("ratio <= 0.25")
    wide = rows.pivot(index="model", columns="method", values=column)
    return wide[["Original", "HEAPr"]].astype(float).dropna()


def _on_other_text(table: pd.DataFrame, text: str) -> str:
    rises = table.loc[text].drop(text)
    if rises.empty:
        return ""
    more = "more" if rises.min() > table.loc[text, text] else "not always more"
    return (
        f"On text of other kinds it costs {more}: Δloss is {table.loc[text, text]:.3f} "
        f"nats per token on {text}, and {value_range(rises)} on {listed(rises.index)}."
    )


def _of_mixture(table: pd.DataFrame, corpus: str) -> str:
    pair = [str(name) for name in table.index if name in table.columns]
    if "mixture" not in table.index or len(pair) != 2:
        return ""
    mixed, alone = table.loc["mixture", pair], table.loc[corpus, pair]
    return (
        f"Calibrated on half of {pair[0]} and half of {pair[1]}, the larger of the two "
        f"losses is {mixed.max():.3f} instead of {alone.max():.3f}, and that on "
        f"{corpus} {mixed[corpus]:.3f} instead of {alone[corpus]:.3f}."
    )


def amount_of_text(sizes: pd.DataFrame) -> str:
    """What more windows gain on the corpus that they are of.

    Args:
        sizes: from `figures.calibration_size_data`.
    """
    curves = sizes[sizes["calibration"].eq(sizes["dataset"])]
    curves = curves.sort_values("n_sequences")
    text = "; ".join(
        f"{corpus} {part['value'].iloc[0]:.2f} to {part['value'].iloc[-1]:.2f}"
        for corpus, part in curves.groupby("dataset")
    )
    least, most = curves["n_sequences"].min(), curves["n_sequences"].max()
    return (
        f"From {least} to {most} windows, perplexity on the calibrated corpus goes "
        f"from {text}."
    )


def other_text(losses: pd.DataFrame) -> str:
    """What the mask of another corpus costs on each of two.

    Args:
        losses: from `paper.mask_losses`.
    """
    table = losses.pivot(index="mask", columns="dataset", values="delta_nll")
    pair = [str(name) for name in table.index if name in table.columns]
    more = [
        f"{table.loc[other, corpus] - table.loc[corpus, corpus]:+.3f} on {corpus}"
        for corpus, other in (pair, pair[::-1])
    ]
    return (
        "With the mask of the other corpus instead of its own, Δloss changes by "
        f"{listed(more)}, in nats per token."
    )


def importance(
    scores: "pd.Series[float]", ranks: pd.DataFrame, facts: Mapping[str, object]
) -> Answer:
    """What one pass measures, and how the scores are spread.

    Args:
        scores: HEAPr's, of every atom.
        ranks: correlations of rankings, by estimator.
        facts: `tokens` (predicted), `corpus`, `experts`, `unrouted` and `passes` (the
            time of one pass ÷ that of a forward and backward pass, several models).
    """
    spread = scores.quantile(0.9) / scores.quantile(0.1)
    largest = scores.nlargest(max(1, len(scores) // 20)).sum() / scores.sum()
    passes = pd.Series(facts["passes"])
    short = (
        f"One forward and backward pass over {facts['tokens']:,} predicted tokens of "
        f"{facts['corpus']} gives the sums of {len(scores):,} atomic experts, from "
        f"which every score is computed; {facts['unrouted']} of {facts['experts']} "
        f"experts got no tokens. It takes {value_range(passes, '.2f')} × the time of "
        "the same pass without the sums."
    )
    unlike = ranks["heapr"].drop("heapr")
    more = [
        f"The upper decile of HEAPr's scores is {spread:.0f} times the lower one, and "
        f"the twentieth with the highest scores has {largest:.0%} of their sum.",
        f"Of the other scores, {unlike.idxmax()} ranks most like it (Spearman "
        f"{unlike.max():.2f}), and {unlike.idxmin()} least ({unlike.min():.2f}).",
    ]
    return answer(short, more)


def quality(
    windows: pd.DataFrame, items: pd.DataFrame, default: str, corpus: str
) -> Answer:
    """What the default saves of HEAPr's loss on a pretrained model.

    Args:
        windows: the losses of its states, as `intervals.loss_difference` takes them.
        items: their answers.
        default: the method that is compared with "heapr".
        corpus: the one that was calibrated on.
    """
    same = windows["corpus"].eq(corpus)
    ratios = sorted({*windows.loc[windows["method"].eq(default), "ratio"]})
    if not ratios:
        return answer(f"{default} has not been measured on a pretrained model.")
    text = "; ".join(
        f"at {ratio:.0%} {_beside_heapr(windows[same], default, ratio)} on {corpus}, "
        f"{_beside_heapr(windows[~same], default, ratio)} on other text "
        f"({len(state(windows, default, ratio))} windows)"
        for ratio in ratios
    )
    short = (
        f"Δloss of {default} against that of HEAPr on the pretrained MoE, in nats per "
        f"token, with 95 % intervals of the difference: {text}."
    )
    tasks = {r: accuracy_difference(items, default, "heapr", r) for r in ratios}
    accuracies = "; ".join(
        f"at {ratio:.0%} {gap.said('+.1%')} ({len(state(items, default, ratio))} items)"
        for ratio, gap in tasks.items()
        if gap
    )
    return answer(short, [f"Mean accuracy on the tasks minus HEAPr's: {accuracies}."])


def _beside_heapr(windows: pd.DataFrame, method: str, ratio: float) -> str:
    gaps = {
        name: loss_difference(windows, name, "dense", ratio)
        for name in (method, "heapr")
    }
    losses = {name: gap.value for name, gap in gaps.items() if gap is not None}
    if len(losses) < 2:
        return "not measured"
    apart = loss_difference(windows, method, "heapr", ratio)
    assert apart is not None
    return (
        f"{losses[method]:.2f} against {losses['heapr']:.2f} ({apart.low:+.2f} to "
        f"{apart.high:+.2f})"
    )


def methods(
    data: pd.DataFrame, rankings: pd.DataFrame, measured: pd.DataFrame
) -> Answer:
    """Which way to compress loses least, and where merging beats random atoms.

    Args:
        data: from `methods_data`: variant, group, ratio and pooled.
        rankings: the paper's order beside ours.
        measured: rows of every model.
    """
    ratio = 0.4 if 0.4 in set(data["ratio"]) else data["ratio"].median()
    at = data[data["ratio"].eq(ratio)]
    best = at.loc[at.groupby("group")["pooled"].idxmin()].sort_values("pooled")
    text = "; ".join(
        f"{row['group']} {row['variant']} {row['pooled']:.3f}"
        for row in best.to_dict("records")
    )
    short = (
        f"Best of each kind at {ratio:.0%}, Δloss in nats per token on the calibrated "
        f"corpus, mean of {int(at['n_models'].max())} models: {text}."
    )
    same = rankings["same rank"].mean() if len(rankings) else 1.0
    against = (
        f"Only {same:.0%} of the paper's ranks are the same here; it quotes its rows "
        "of other methods from other papers, with their calibration."
        if same < 1
        else ""
    )
    return answer(short, [_where_merging_wins(measured, ratio)], [against])


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
        f"Beside removing random atoms, merging (HC-SMoE) loses {text}. It averages "
        "experts, so it should lose less where they began as copies of one (upcycled) "
        "and more where they were trained from scratch. Exceptions: "
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
        "that beats random atoms, merging may, too, without any gain of its own."
    )


def _pairs(losses: pd.DataFrame, beside: str = "random") -> str:
    return listed(
        f"the {model} ({row['hc-smoe']:.3f} against {row[beside]:.3f})"
        for model, row in losses.iterrows()
    )


def own_model(
    relative: pd.DataFrame,
    ratio: float,
    sizes: tuple[int, int],
    largest: "pd.Series[float]",
) -> Answer:
    """How small a model became within a limit, and what the largest run took.

    Args:
        relative: perplexity ÷ dense, a row for each ratio, a column for each corpus.
        ratio: the one that was exported.
        sizes: bytes of the dense and of the pruned files.
        largest: a row of `benchmarks/streaming.py`.
    """
    corpus = relative.columns[0]
    dense, pruned = (size / 1e6 for size in sizes)
    rise = relative.loc[ratio, corpus] - 1
    which = (
        f"{ratio:.0%} is the largest within a rise of a tenth"
        if rise <= 0.1
        else f"none is within a rise of a tenth, and {ratio:.0%} was exported"
    )
    short = (
        f"Of the ratios that were tried, {which}: perplexity on {corpus} changes by "
        f"{rise:+.1%}, and the files shrink from {dense:.1f} to {pruned:.1f} MB."
    )
    rises = relative.loc[ratio].drop(corpus) - 1
    other_text = (
        f"On other text perplexity rises by {value_range(rises, '.0%')}."
        if len(rises)
        else ""
    )
    at_size = (
        "The largest checkpoint that was run, "
        f"{largest['checkpoint_bytes'] / 1e9:.0f} GB of random weights, was scored, "
        f"pruned and evaluated from disk in {largest['peak_bytes'] / 1e9:.1f} GB of "
        "memory."
    )
    return answer(short, [other_text, at_size])
