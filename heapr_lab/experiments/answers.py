"""What the notebooks answer, in sentences of their numbers.

Most functions take the frames of one notebook and return its `Answer`. What was
found against the paper is said first; the paper's numbers are named as the paper's.
Notebooks about the paper's claims begin with `claims.answer_of`.
"""

import html
from collections.abc import Hashable, Iterable, Mapping

import pandas as pd

from heapr_lab.experiments.intervals import AGREES, DISAGREES, UNDECIDED, UNTESTED
from heapr_lab.figures.comparisons import DRAWN
from heapr_lab.figures.curves import paper_table
from heapr_lab.figures.style import look
from heapr_lab.pruning.savings import at_context

_SAYS = {
    AGREES: "{model} **agrees**",
    DISAGREES: "{model} **disagrees**",
    UNDECIDED: "{model} leaves it **undecided**",
    UNTESTED: "It **cannot be tested** here",
}


class Prose(str):
    """Sentences that a notebook shows as text."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return str(self)


class Answer(Prose):
    """The answer to the question of a notebook."""

    short: Prose
    """Its beginning: what was found against the paper, if anything, and little more."""


def answer(short: str, more: Iterable[str] = ()) -> Answer:
    """An `Answer`, of the sentences that are not empty."""
    whole = Answer(" ".join(filter(None, [short, *more])))
    whole.short = Prose(short)
    return whole


class Folded:
    """A table that a notebook shows below a line that is clicked."""

    def __init__(self, frame: pd.DataFrame, title: str) -> None:
        self._frame, self._title = frame, title

    def _repr_html_(self) -> str:
        title = f"{html.escape(self._title)} ({len(self._frame)} rows)"
        table = self._frame.to_html(na_rep="–")
        return f"<details><summary>{title}</summary>{table}</details>"

    def __repr__(self) -> str:
        return f"{self._title} ({len(self._frame)} rows)"


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
    verdict = _SAYS[row["verdict"]].format(model=model)
    return f"The paper says: {row['claim']}{paper}. {verdict}: {row['found']}."


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


def amount_of_text(sizes: pd.DataFrame, *, ratio: float) -> str:
    """What more windows gain on the corpus that they are of, and on items.

    Args:
        sizes: from `figures.calibration_size_data`.
        ratio: the share of the atoms that is removed.
    """
    least, most = sizes["n_sequences"].min(), sizes["n_sequences"].max()
    text = (
        f"Where {ratio:.0%} is removed, from {least} to {most} windows (mean of "
        f"{sizes['n_seeds'].max()} draws ± standard deviation) perplexity on the "
        "calibrated corpus goes "
    )
    text += _from_to(sizes[sizes["calibration"].eq(sizes["dataset"])], ".2f")
    accuracies = sizes[sizes["metric"].eq("accuracy")]
    if len(accuracies):
        text += f", and accuracy {_from_to(accuracies, '.1%')}"
    return f"{text}."


def _from_to(curves: pd.DataFrame, form: str) -> str:
    """The values at the smallest and the largest size, for each calibrated corpus."""
    changes = []
    for corpus, curve in curves.sort_values("n_sequences").groupby("calibration"):
        ends = curve.iloc[[0, -1]]
        first, last = (
            f"{value:{form}} ± {spread:{form}}"
            for value, spread in zip(ends["value"], ends["spread"], strict=True)
        )
        changes.append(f"from {first} to {last} ({corpus})")
    return listed(changes)


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


def best_scores(curves: pd.DataFrame, ratio: float) -> str:
    """Which of the scores that are drawn has the lowest perplexity on each corpus.

    Args:
        curves: from `figures.main_data`.
        ratio: the one that is removed.
    """
    rows = curves[curves["source"].eq("ours") & curves["metric"].eq("perplexity")]
    rows = rows[rows["name"].isin(DRAWN) & rows["ratio"].gt(0)]
    apart = rows["ratio"].sub(ratio).abs()  # methods round to whole atoms
    near = apart.eq(apart.groupby([rows["dataset"], rows["name"]]).transform("min"))
    wide = rows[near].pivot(index="dataset", columns="name", values="value")
    lowest = wide.idxmin(axis="columns").map(lambda name: look(name).label)
    text = listed(
        f"*{name}* on {listed(corpora)}"
        for name, corpora in lowest.groupby(lowest).groups.items()
    )
    more = wide["heapr"] / wide.min(axis="columns")
    return (
        "Of the scores that are drawn, the one with the lowest perplexity where "
        f"{ratio:.0%} is removed is {text}; HEAPr's is {value_range(more, '.2f')} "
        "times as high."
    )


def importance(
    scores: "pd.Series[float]", ranks: pd.DataFrame, facts: Mapping[str, object]
) -> Answer:
    """What one pass measures, and how the scores are spread.

    Args:
        scores: HEAPr's, of every atom.
        ranks: correlations of rankings, by estimator.
        facts: `tokens` (predicted), `corpus`, `experts`, `unrouted` and `cost` (what
            one pass takes, in words).
    """
    spread = scores.quantile(0.9) / scores.quantile(0.1)
    largest = scores.nlargest(max(1, len(scores) // 20)).sum() / scores.sum()
    short = (
        f"One forward and backward pass over {facts['tokens']:,} predicted tokens of "
        f"{facts['corpus']} gives the sums of {len(scores):,} atomic experts, from "
        f"which every score is computed; {facts['unrouted']} of {facts['experts']} "
        f"experts got no tokens. {facts['cost']}"
    )
    unlike = ranks["heapr"].drop("heapr")
    more = [
        f"The upper decile of HEAPr's scores is {spread:.0f} times the lower one, and "
        f"the twentieth with the highest scores has {largest:.0%} of their sum.",
        f"Of the other scores, {unlike.idxmax()} ranks most like it (Spearman "
        f"{unlike.max():.2f}), and {unlike.idxmin()} least ({unlike.min():.2f}).",
    ]
    return answer(short, more)


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
