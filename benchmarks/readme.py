"""Results in README.md and benchmarks/README.md: the blocks that are generated.

A block is between `<!-- NAME -->` and `<!-- end -->`; the text around it is written by
hand.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks.figures import real
from benchmarks.figures.cost import cost_said, gpu_runs
from benchmarks.index import BENCHMARKS, Benchmark, results_of, rows_beside
from heapr_lab.errors import SpecError
from heapr_lab.experiments.answers import value_range
from heapr_lab.experiments.claims import ON_C4, Evidence, claims
from heapr_lab.experiments.intervals import (
    DISAGREES,
    UNTESTED,
    VERDICTS,
    accuracy_difference,
    state,
)
from heapr_lab.figures.files import table_markdown
from heapr_lab.storage import paths
from heapr_lab.tasks.paper_tasks import GUESSING
from heapr_lab.workbench.settings import PROFILES

MOST_ROWS = 10
"""The most rows of a table in sight."""

# --- README.md --------------------------------------------------------------------


def front_blocks(
    claimed: pd.DataFrame, measured: Mapping[str, pd.DataFrame]
) -> dict[str, str]:
    """The blocks of README.md that contain numbers.

    Args:
        claimed: from `claims_table`.
        measured: rows of the benchmarks, from `index.measured`.
    """
    beside = [rows_beside("real", part) for part in ("windows", "items")]
    costs = (
        _cost(measured["cost"]),
        f"{_cost_on_gpu(measured['gpu'])} {_sliced_on_gpu(measured['speed_gpu'])}",
        _streamed(measured["streaming"]),
    )
    return {
        "real": as_block(real.real_front_table(measured["real"], *beside)),
        "measured_on": real.measured_on(*beside),
        "calibrated_on": real.FRONT_TEXT.partition(", ")[2],
        "cost": "\n" + "".join(f"* {line}\n" for line in costs),
        "claims": as_block(in_short(claimed)),
    }


def claims_blocks(
    claimed: pd.DataFrame, measured: Mapping[str, pd.DataFrame]
) -> dict[str, str]:
    """The blocks of docs/claims.md; arguments as `front_blocks`."""
    return {
        "compared_on": real.compared_on(
            measured["real"],
            rows_beside("real", "windows"),
            BENCHMARKS["real"].machine()["calibration"].partition(",")[0],
        )
        + _reproduced_on(),
        "claims": as_block(claimed),
    }


def _reproduced_on() -> str:
    """What the rows are of that `make reproduce` measures."""
    lab, pretrained = PROFILES["lab"], PROFILES["pretrained"]
    return (
        f" `lab` is calibrated on {lab.n_sequences} windows of {lab.seq_len} tokens of "
        f"pydocs, and measured on {lab.n_test} windows as long of each corpus, spread "
        f"over its test split, and on {lab.n_items} items of the continuation task. "
        "The rows of `smolmoe` on FLOPs, layers and tenths are from `make reproduce "
        f"MODEL=smolmoe`, calibrated on {pretrained.n_sequences} windows of "
        f"{pretrained.seq_len} tokens of pydocs."
    )


def _cost(rows: pd.DataFrame) -> str:
    """What the scores cost beside the paper's algorithm."""
    machine, n_models = BENCHMARKS["cost"].machine(), rows["d_model"].nunique()
    return (
        f"{cost_said(rows)} ({n_models} random models, {machine['n_threads']} thread "
        f"of an {machine['device']})."
    )


def _cost_on_gpu(rows: pd.DataFrame) -> str:
    """The same on a GPU, at equal batches, where a kernel adds up the statistics."""
    runs = gpu_runs(rows)
    runs = runs[runs["sums"].eq("kernel")]
    devices = " and an ".join(runs["device"].unique())
    runs = runs.pivot_table(index="model", columns="case", values="seconds")
    same = runs["scores, same batch"].fillna(runs["scores"])

    def times(seconds: "pd.Series[float]", base: "pd.Series[float]") -> str:
        return f"{value_range(seconds / base, '.2f')} ×"

    return (
        f"On an {devices} it takes {times(same, runs['plain'])}, Algorithm 1 "
        f"{times(runs['two_stage'], runs['plain'])}; `compress`, before it took steps, "
        f"{times(runs['compress'], runs['scores'])} the scores (random weights of "
        f"{' and '.join(runs.index)} in bfloat16; [where the time goes](docs/models.md"
        "#on-a-gpu))."
    )


def _sliced_on_gpu(rows: pd.DataFrame) -> str:
    """How fast pruned models run beside dense ones."""
    sliced = rows[rows["method"].eq("sliced") & rows["ratio"].gt(0)]
    prefill = sliced["mode"].eq("prefill")
    first, then = (
        value_range(sliced.loc[which, "speedup_over_dense"], ".2f")
        for which in (prefill, ~prefill)
    )
    return (
        f"Pruned by {value_range(sliced['ratio'], '.0%')}, experts of different widths "
        f"run at {first} × the dense model's speed in prefill and {then} × in decode "
        "([short texts, few layers](benchmarks/README.md"
        "#how-fast-sliced-experts-run-on-a-gpu))."
    )


_STEPS = ("identity", "scores", "loss", "masked loss", "pruning", "pruned loss")


def _streamed(rows: pd.DataFrame) -> str:
    """The largest streamed checkpoint, and the price of streaming where both run."""
    large = rows.loc[rows["checkpoint_bytes"].idxmax()]
    paired = rows.pivot(index="model", columns="way", values="scores").dropna()
    price = (paired["streamed"] / paired["in memory"]).max()
    minutes = sum(large[step] for step in _STEPS) / 60
    return (
        f"A checkpoint of {large['checkpoint_bytes'] / 1e9:.0f} GB (random weights, as "
        f"wide and deep as DeepSeekMoE-16B) is scored, pruned and evaluated in "
        f"{large['peak_bytes'] / 1e9:.1f} GB of memory ({large['tokens']} tokens, "
        f"{minutes:.0f} min, {large['bytes_read'] / 1e9:.0f} GB read); where both fit, "
        f"streamed scores take {price:.2f} × the time "
        "(`benchmarks/streaming.py`)."
    )


# --- claims -----------------------------------------------------------------------

_REPRODUCED = paths.project_dir() / "data" / "smolmoe" / "claims.csv"
"""From `make reproduce MODEL=smolmoe`, for what `benchmarks/real.py` does not test:
FLOPs, which layers lose most, and bins of atoms; `make publish` takes its table, if
there is one."""
_REAL, _LAB = "`smolmoe`, carved from SmolLM2", "`lab`, trained here"


def real_evidence(rows: pd.DataFrame) -> Evidence:
    """What was measured of the pretrained MoE: `real.csv` and the files beside it."""
    windows, items = (
        pd.concat([real.first_states(frame), _on_c4(frame)])
        for frame in (rows_beside("real", part) for part in ("windows", "items"))
    )
    table = real.first_states(rows)
    return Evidence(
        calibrated_on=real.FITTED_TO,
        windows=windows,
        items=items,
        kept=kept_of_items(items, table[table["method"].eq("heapr")]),
    )


def gpu_evidence(rows: pd.DataFrame) -> pd.DataFrame:
    """`Evidence.gpu` of the models of `benchmarks/gpu.py` that were scored whole."""
    runs = gpu_runs(rows)
    ways = runs["way"].str.removeprefix("scores, ")
    scored = runs["case"].isin(["scores", "scores, batch 1"])
    whole = runs["n_layers"].eq(runs["of_layers"])
    return runs.assign(way=ways)[scored & whole]


def kept_of_items(items: pd.DataFrame, states: pd.DataFrame) -> pd.DataFrame:
    """`Evidence.kept` of HEAPr's states.

    Args:
        items: answers of the dense model and of HEAPr at several ratios.
        states: by ratio, the shares of the whole model and of its FLOPs that are
            removed: columns ratio, parameters_saved, flops_saved.
    """
    shares = {"parameters_saved": "removed", "flops_saved": "flops"}
    rows = states.rename(columns=shares)[["ratio", *shares.values()]].to_dict("records")
    kept = [(row, _kept(items, row["ratio"])) for row in rows]
    return pd.DataFrame([row | part for row, part in kept if part])


def _kept(items: pd.DataFrame, ratio: float) -> dict[str, float] | None:
    """Shares of the accuracy on the items that the dense model and HEAPr share."""
    change = accuracy_difference(items, "heapr", "dense", ratio)
    if change is None:
        return None
    dense, pruned = (state(items, name, ratio) for name in ("dense", "heapr"))
    shared = dense.merge(pruned[["task", "item"]])
    whole = shared.groupby("task")["acc"].mean().mean()
    kept = change.mapped(lambda x: 1 + x / whole)
    return vars(kept) | {"guessing": GUESSING / whole}


def _on_c4(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of HEAPr calibrated on C4, under a name of their own."""
    rows = frame[real.of_model(frame) & frame["fitted_to"].eq("c4")]
    return rows[rows["method"].eq("heapr")].assign(method=ON_C4)


def claims_table(
    lab: pd.DataFrame, measured: Mapping[str, pd.DataFrame]
) -> pd.DataFrame:
    """The paper's claims on the pretrained MoE and on lab models, refuted ones first.

    Args:
        lab: `claims.claims` of the lab model, as committed.
        measured: rows of the benchmarks, from `index.measured`.
    """
    gpu = gpu_evidence(results_of("gpu"))
    on_real = dataclasses.replace(real_evidence(measured["real"]), gpu=gpu)
    real_claims = claims(on_real).set_index("number")
    real_claims = _filled(real_claims, pd.read_csv(_REPRODUCED).set_index("number"))
    lab = lab.set_index("number")
    others = claims(Evidence("pydocs", rivals=results_of("methods"), gpu=gpu))
    lab = _filled(lab, others.set_index("number"))
    texts = real_claims["claim"] + " (the paper: " + real_claims["paper"] + ")"
    texts = texts.str.removesuffix(" (the paper: )")
    cells = _cells(real_claims), _cells(lab)
    cells = cells[0], cells[1].where(cells[0].ne(cells[1]), "the same")
    table = pd.DataFrame(
        {"the paper": texts} | dict(zip((_REAL, _LAB), cells, strict=True))
    )
    places = pd.DataFrame([real_claims["verdict"], lab["verdict"]]).map(VERDICTS.index)
    return table.loc[places.min().sort_values(kind="stable").index]


def _filled(table: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """The claims, and those of `others` in place of what was not tested."""
    tested = others["verdict"].ne(UNTESTED) & table["verdict"].eq(UNTESTED)
    return table.where(~tested, others)


def _cells(table: pd.DataFrame) -> "pd.Series[str]":
    verdicts = table["verdict"].replace({DISAGREES: f"**{DISAGREES}**"})
    return verdicts + ": " + table["found"]


def in_short(table: pd.DataFrame) -> pd.DataFrame:
    """`claims_table` with what decides on the pretrained MoE, and a verdict beside it.

    What decides is told first, up to a semicolon.
    """
    texts = table["the paper"].str.partition("; ")
    papers = texts[0].where(texts[1].eq(""), texts[0] + ")")
    return table.assign(
        **{
            "the paper": papers,
            _REAL: table[_REAL].str.partition("; ")[0],
            _LAB: table[_LAB].str.partition(": ")[0],
        }
    )


def main_table() -> pd.DataFrame:
    """The paper's main table on the pretrained MoE, for docs/comparing.md."""
    windows, items = (rows_beside("real", part) for part in ("windows", "items"))
    return real.main_table(results_of("real"), windows, items)


# --- benchmarks/README.md ---------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A block of `benchmarks/README.md`, and the heading used when it is added."""

    title: str
    block: str


def sections(measured: Mapping[str, pd.DataFrame]) -> dict[str, Section]:
    """Every section of `benchmarks/README.md`.

    Args:
        measured: rows of the benchmarks, from `index.measured`.
    """
    return {
        name: Section(BENCHMARKS[name].title, _shown(BENCHMARKS[name], data))
        for name, data in measured.items()
    }


def _shown(row: Benchmark, data: pd.DataFrame) -> str:
    """What a benchmark was measured on, its figure, if it has one, and its table."""
    results = row.results.removeprefix("benchmarks/")
    intro = (
        f"\n[`benchmarks/{row.script}`]({row.script}): {row.measured_on(row.rows())} "
        f"([every row]({results}), [machine]({results.removesuffix('csv')}json)).\n"
    )
    figure = f"\n[Figure](../figures/{row.stem}.png).\n" if row.figure else ""
    return f"{intro}{figure}{folded(row.table(data))}"


def folded(frame: pd.DataFrame) -> str:
    """A block of the table, below a line that is clicked if it is long."""
    block, rows = as_block(frame), len(frame)
    if rows <= MOST_ROWS:
        return block
    return f"\n<details><summary>{rows} rows</summary>\n{block}\n</details>\n"


def fill_sections(path: Path, sections: Mapping[str, Section]) -> None:
    """Fill the block of each section; a missing one is added at the end of the file."""
    text = path.read_text(encoding="utf-8")
    added = [
        f"\n## {section.title}\n\n<!-- {name} --><!-- end -->\n"
        for name, section in sections.items()
        if f"<!-- {name} -->" not in text
    ]
    path.write_text(text + "".join(added), encoding="utf-8")
    fill_blocks(path, {name: section.block for name, section in sections.items()})


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
