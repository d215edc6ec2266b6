"""Results in README.md and figures/README.md: the blocks that are generated.

A block is between `<!-- NAME -->` and `<!-- end -->`; the text around it is written by
hand.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.figures.methods import best_methods_table
from benchmarks.figures.quality import gains_table
from benchmarks.figures.real import real_front_table
from benchmarks.index import BENCHMARKS, Benchmark
from heapr_lab.errors import SpecError
from heapr_lab.experiments.claims import CALIBRATED, OTHERS
from heapr_lab.figures.files import table_markdown

# --- README.md --------------------------------------------------------------------


def front_blocks(
    claims: pd.DataFrame, measured: Mapping[str, pd.DataFrame]
) -> dict[str, str]:
    """The blocks of README.md that contain numbers.

    Args:
        claims: from `claims.claims`.
        measured: rows of the benchmarks, from `index.measured`.
    """
    return {
        "numbers": _numbers(measured),
        "real": as_block(real_front_table(measured["real"])),
        "claims": as_block(claims_by_corpus(claims)),
        "better": as_block(better_table(measured)),
        "methods": as_block(best_methods_table(measured["methods"])),
    }


def better_table(measured: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Δloss of the default ÷ HEAPr's at equal atoms, on every model."""
    return gains_table(measured["quality_models"])


def _numbers(measured: Mapping[str, pd.DataFrame]) -> str:
    """Two list items: the cost of one pass, and the Δloss of the best variant."""
    cost = measured["cost"]
    times = {
        method: cost.loc[cost["method"].eq(method), "times_baseline"]
        for method in ("one_pass", "two_stage")
    }
    one, two = (f"{t.min():.2f} to {t.max():.2f}" for t in times.values())
    better = better_table(measured)
    alone = gains_table(measured["quality_models"], "compress")
    own, corpus = (_pooled_gains(table.iloc[-1]) for table in (better, alone))
    models = len(better) - 1
    machine = BENCHMARKS["cost"].machine()
    return (
        f"\n* Scoring costs **{one} ×** a forward and backward pass; the paper's "
        f"Algorithm 1 costs {two} × ({len(times['one_pass'])} random models, "
        f"{machine['n_threads']} thread of an {machine['device']}).\n"
        "* With 40 % of the atomic experts gone and nothing trained, `heapr-lab prune` "
        f"loses {own} ({models} lab models, pydocs and WikiText-2; worst: any ratio).\n"
        f"* Fitted to the corpus alone (`compress`, `--own-text 0`), {corpus}.\n"
        f"* {_streamed(measured['streaming'])}\n"
    )


_STEPS = ("identity", "scores", "loss", "masked loss", "pruning", "pruned loss")


def _streamed(rows: pd.DataFrame) -> str:
    """The largest streamed checkpoint, and the price of streaming where both run."""
    large = rows.loc[rows["checkpoint_bytes"].idxmax()]
    paired = rows.pivot(index="model", columns="way", values="scores").dropna()
    price = (paired["streamed"] / paired["in memory"]).max()
    minutes = sum(large[step] for step in _STEPS) / 60
    return (
        f"A checkpoint of {large['checkpoint_bytes'] / 1e9:.0f} GB (random weights of "
        f"DeepSeekMoE-16B's shape) is scored, pruned and evaluated in "
        f"**{large['peak_bytes'] / 1e9:.1f} GB** of memory ({large['tokens']} tokens, "
        f"{minutes:.0f} min, {large['bytes_read'] / 1e9:.0f} GB read); where both fit, "
        f"streamed scores take **{price:.2f} ×** the time "
        "(`benchmarks/streaming.py`)."
    )


def _pooled_gains(row: "pd.Series[Any]") -> str:
    """The row of all models of `gains_table` at 40 %, in words."""
    parts = []
    for text, where in (("the calibrated corpus", ""), ("other text", ", other text")):
        pooled = row[f"40 %{where} ↓"].partition(" ")[0]
        worst = row[f"worst{where} ↓"]
        parts.append(f"**{pooled} ×** what HEAPr loses on {text} (worst: {worst} ×)")
    return " and ".join(parts)


def claims_by_corpus(found: pd.DataFrame) -> pd.DataFrame:
    """`claims` with one row for each claim and a column for each kind of corpus.

    Claims without a corpus (accuracy, tenths) are in the column of the calibrated one.
    """
    split = found["claim"].str.extract(rf"^(?:({CALIBRATED}|{OTHERS}), )?(.*)$")
    where, claim = split[0].fillna(CALIBRATED), split[1]
    holds = found["holds"].map({True: "yes: ", False: "**no**: "})
    long = pd.DataFrame(
        {"claim": claim, "where": where, "found": holds + found["found"]}
    )
    table = long.pivot(index="claim", columns="where", values="found")
    order = list(dict.fromkeys(claim))
    return table.loc[order, list(dict.fromkeys(where))].reset_index()


# --- figures/README.md ------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A block of `figures/README.md`, and the heading used when it is added."""

    title: str
    block: str


def sections(
    summary: pd.DataFrame, claims: pd.DataFrame, measured: Mapping[str, pd.DataFrame]
) -> dict[str, Section]:
    """Every section of `figures/README.md`.

    Args:
        summary: from `summary_table`.
        claims: from `claims.claims`.
        measured: rows of the benchmarks, from `index.measured`.
    """
    holds = claims["holds"].map({True: "yes", False: "**no**"})
    checked = as_block(claims.assign(holds=holds))
    found = {
        "summary": Section("What pruning costs and saves", as_block(summary)),
        "claims": Section("The paper's claims", checked),
    }
    for name, data in measured.items():
        row = BENCHMARKS[name]
        found[name] = Section(row.title, _shown(row, data))
    return found


def _shown(row: Benchmark, data: pd.DataFrame) -> str:
    """A benchmark's machine, its figure, if it has one, and its table."""
    machine = row.machine()
    results = f"../{row.results}"
    said = (
        f"\nBy [`benchmarks/{row.script}`](../benchmarks/{row.script}), "
        f"{machine['date'][:10]}, {machine['device']} with {machine['n_cpus']} CPUs, "
        f"torch {machine['versions']['torch']}: [every row]({results}), "
        f"[machine]({results.removesuffix('csv')}json).\n"
    )
    figure = f"\n![{row.title}]({row.stem}.png)\n" if row.figure else ""
    return f"{said}{figure}{as_block(row.table(data))}"


def fill_sections(path: Path, found: Mapping[str, Section]) -> None:
    """Fill the block of each section; a missing one is added at the end of the file."""
    text = path.read_text(encoding="utf-8")
    added = [
        f"\n## {section.title}\n\n<!-- {name} --><!-- end -->\n"
        for name, section in found.items()
        if f"<!-- {name} -->" not in text
    ]
    path.write_text(text + "".join(added), encoding="utf-8")
    fill_blocks(path, {name: section.block for name, section in found.items()})


# --- blocks -----------------------------------------------------------------------


def fill_blocks(path: Path, blocks: Mapping[str, str]) -> None:
    """Write each block between `<!-- name -->` and `<!-- end -->` of a text file.

    Raises:
        SpecError: the file lacks one of the blocks.
    """
    text = path.read_text(encoding="utf-8")
    for name, block in blocks.items():
        parts = re.split(
            rf"<!-- {name} -->.*?<!-- end -->", text, maxsplit=1, flags=re.DOTALL
        )
        if len(parts) != 2:
            raise SpecError(
                f"{path} has no block '<!-- {name} --> … <!-- end -->'; add one where "
                "the numbers belong"
            )
        head, tail = parts
        text = f"{head}<!-- {name} -->{block}<!-- end -->{tail}"
    path.write_text(text, encoding="utf-8")


def as_block(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table, surrounded by newlines."""
    return f"\n{table_markdown(frame).strip()}\n"
