"""The questions of `figures/README.md`: a picture, an answer, and where it is from.

Each answer is made from committed files; the claims of the paper among them are those
of the lab model, as `heapr-lab reproduce` wrote them.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks import advice, sentences
from benchmarks.figures import cost, methods, quality, real
from benchmarks.index import BENCHMARKS, results_of, rows_beside
from heapr_lab.checkpoints.provenance import read_provenance
from heapr_lab.experiments import answers
from heapr_lab.experiments.answers import listed, value_range
from heapr_lab.figures.files import table_markdown
from heapr_lab.storage import paths

_MIDDLE = 0.4
"""The ratio of the answers that are about one."""
_TEXT_RATIO = 0.2
"""`paper.CALIBRATION_RATIO`, without torch."""


@dataclass(frozen=True)
class Committed:
    """What is committed: tables of the lab model, and results of the benchmarks."""

    summary: pd.DataFrame
    """From `figures.summary_table`."""
    claims: pd.DataFrame
    """`claims.claims` of the lab model."""
    measured: Mapping[str, pd.DataFrame]
    """Rows of the benchmarks, from `index.measured`."""

    def claim(self, number: int) -> str:
        """What the paper claims, and what the lab model has to say about it."""
        row = self.claims.fillna("").set_index("number").loc[number]
        return answers.claim_in_words(row.to_dict(), "The lab model")


@dataclass(frozen=True)
class Question:
    """A section of the page, as `questions.toml` says."""

    block: str
    text: str
    stem: str
    notebook: str = ""
    benchmark: str = ""
    measures: str = ""
    """Format of what was measured, of the fields of `_of_lab_model`."""
    claims: Sequence[int] = ()
    summary: bool = False
    """Whether the summary of the lab model is the table below the answer."""

    def answer(self, committed: Committed) -> str:
        """The answer in words."""
        if self.claims:
            return " ".join(committed.claim(number) for number in self.claims)
        return _ANSWERS[self.block](committed)


def blocks(committed: Committed) -> dict[str, str]:
    """Every block of `figures/README.md`, by name."""
    return {question.block: _shown(question, committed) for question in QUESTIONS}


def _shown(question: Question, committed: Committed) -> str:
    parts = [f"![{question.text}]({question.stem}.png)", question.answer(committed)]
    if question.summary:
        parts.append(table_markdown(committed.summary).strip())
    parts.append(" · ".join([*_measured(question), *_files(question)]))
    return "\n" + "\n\n".join(parts) + "\n"


def _measured(question: Question) -> list[str]:
    """What was measured, and the command that does it again."""
    if question.benchmark:
        row = BENCHMARKS[question.benchmark]
        told = row.measured_on(row.drawn(row.rows()))
        return [f"Measured: {told}", f"`python benchmarks/{row.script}{row.arguments}`"]
    if not question.measures:
        return []  # a drawing
    text = question.measures.format_map(_of_lab_model(question.stem))
    return [f"Measured: {text}", "`make publish`"]


def _files(question: Question) -> list[str]:
    """Links to the drawing, or rows and table, and to the notebook."""
    stem = question.stem
    files = {
        "drawing": f"{stem}.svg",
        "rows": f"data/{stem}.csv",
        "table": f"{stem}_table.md",
    }
    links = [
        f"[{name}]({path})"
        for name, path in files.items()
        if (paths.figures_dir() / path).exists()
    ]
    if question.notebook:
        links.append(f"[notebook](../notebooks/{question.notebook}.ipynb)")
    return links


def _of_lab_model(stem: str) -> dict[str, str]:
    """What a figure of the lab model says of its origin, in words."""
    told = read_provenance(paths.figures_dir() / f"{stem}.png")
    text, profile = told["calibration"], told["profile"]
    windows = f"{text['n_sequences']} windows of {text['seq_len']} tokens"
    n_test = "all" if profile["n_test"] is None else profile["n_test"]
    return {
        "model": told["model"]["name"],
        "calibration": f"calibrated on {windows} of {text['corpus']}",
        "windows": f"{n_test} test windows of {profile['seq_len']} tokens, spread over "
        "a corpus",
        "items": f"{profile['n_items']} items of the continuation task",
        "draws": f"{profile['n_seeds']} draws of the calibration windows",
    }


# --- answers --------------------------------------------------------------------------


def _atom(_committed: Committed) -> str:
    return (
        "Row k of W_gate and of W_up together with column k of W_down: the smallest "
        "part of an expert that can be removed by itself, as an expert's output is the "
        "sum of what its atomic experts write."
    )


def _pretrained(committed: Committed) -> str:
    beside = [rows_beside("real", part) for part in ("windows", "items")]
    table = real.real_front_table(committed.measured["real"], *beside)
    dense, least = table.iloc[0], table["atoms removed"].iloc[1]
    perplexities = [name for name in table if name.startswith("perplexity")]
    pruned = table[table["atoms removed"].eq(least)].to_dict("records")
    corpora = listed(name.split()[1] for name in perplexities)
    dense_model, *states = (
        f"{row['method']} {listed(row[name] for name in perplexities)}, and "
        f"{row['mean accuracy ↑']}"
        for row in (dense, *pruned)
    )
    return (
        f"Perplexity on {corpora}, and mean accuracy: {dense_model}. Without {least} "
        f"of the atoms ({pruned[0]['parameters removed']} of the parameters): "
        f"{'; '.join(states)}. {real.measured_on(*beside)}"
    )


def _gains(committed: Committed) -> str:
    table = quality.models_table(committed.measured["quality"])
    rows = table.set_index("variant").loc[list(quality.DRAWN)]
    columns = "40 % [× HEAPr] ↓", "other text, 40, 60 % [× HEAPr] ↓"
    losses, other = (listed(rows[name].map("{:.2f}".format)) for name in columns)
    return (
        f"Where 40% is removed, {listed(rows.index)} lose {losses} of what HEAPr "
        "loses, pooled over models and corpora; at worst, at 40 or 60%, "
        f"{listed(rows['worst at 40, 60 % [×]'])}; and on text that nothing was "
        f"calibrated on, at 40 and 60%, {other}. Points are left out where HEAPr "
        f"itself loses less than {quality.NOISE:g} standard errors over test windows."
    )


def _best_methods(committed: Committed) -> str:
    data = committed.measured["methods"]
    ranks = methods.rankings_table(data)
    return sentences.methods(data, ranks, results_of("methods")).short


def _scores(_committed: Committed) -> str:
    curves = pd.read_csv(paths.figures_dir() / "data" / "8_methods.csv")
    return f"{answers.best_scores(curves, _MIDDLE)} One pass gives the sums for all."


def _text(committed: Committed) -> str:
    sizes = pd.read_csv(paths.figures_dir() / "data" / "3_calibration_size.csv")
    return f"{answers.amount_of_text(sizes, ratio=_TEXT_RATIO)} {committed.claim(10)}"


def _structures(committed: Committed) -> str:
    rows = committed.measured["structures"].query("ratio == @_MIDDLE")
    ragged = rows.loc[rows["multiple"].isna(), "delta_nll"].iloc[0]
    over = rows.dropna(subset="multiple").groupby("structure", sort=False)
    text = "; ".join(f"{name} {value_range(part['excess_nll'])}" for name, part in over)
    multiples = value_range(rows["multiple"].dropna(), "d")
    removed = over["achieved_ratio"].max()
    most = f"{removed.idxmax()} removes up to {removed.max():.0%} for it"
    return (
        f"Where {_MIDDLE:.0%} is asked for, ragged widths cost {ragged:.3f} nats per "
        f"token. Compared with ragged widths of as many atoms, those that are "
        f"multiples of {multiples} cost more by: {text}; {most}."
    )


def _quantised(committed: Committed) -> str:
    table = advice.quantised_table(committed.measured["quantised"])
    losses = [name for name in table if name.startswith("Δloss")]
    text = "; ".join(
        f"{row['model is']} {row['size, mean ↓']}, at most "
        f"{max((row[name] for name in losses), key=_number)}"
        for row in table.to_dict("records")
    )
    return (
        "What is left of the file, and Δloss of the worst model in nats per token, ± "
        f"one standard error: {text}. Only pruning saves operations."
    )


def _number(text: str) -> float:
    return float(text.split()[0])


def _costs(committed: Committed) -> str:
    said = cost.cost_said(committed.measured["cost"])
    return f"{said}. Both give the same scores."


_ANSWERS: Mapping[str, Callable[[Committed], str]] = {
    "atom": _atom,
    "pretrained": _pretrained,
    "gains": _gains,
    "methods": _best_methods,
    "scores": _scores,
    "text": _text,
    "structures": _structures,
    "quantised": _quantised,
    "costs": _costs,
}
"""What answers a question that is of no claims, by its block."""
_ROWS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text("utf-8"))
QUESTIONS = tuple(Question(block, **row) for block, row in _ROWS.items())
"""The questions in the order of the page."""
