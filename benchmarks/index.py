"""Every table of results in `results/`, and how it is shown: one row each.

`publish.py` draws the figures, writes the tables, and fills the sections of
`benchmarks/README.md`, all from the rows below. A new benchmark needs one script and
one row.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.figures import (
    cost,
    methods,
    quality,
    quantised,
    real,
    speed,
    streaming,
    structures,
)
from heapr_lab.experiments.answers import listed, value_range
from heapr_lab.storage import paths
from heapr_lab.workbench.settings import PROFILES

Reshape = Callable[[pd.DataFrame], pd.DataFrame]


def _as_measured(rows: pd.DataFrame) -> pd.DataFrame:
    return rows


@dataclass(frozen=True)
class Benchmark:
    """A table of results, and how it is presented."""

    name: str
    """Name of its files `benchmarks/results/NAME.csv` and .json, and of its block."""
    title: str
    """Heading of its section in `benchmarks/README.md`."""
    measured_by: str = ""
    """Stem of the script that measures it; if empty, it is the name."""
    arguments: str = ""
    """What the script is given."""
    table: Reshape = _as_measured
    """Makes the table for readers from the rows of `data`."""
    data: Reshape = _as_measured
    """Makes the rows of the figure and the table from the results."""
    figure: Callable[[pd.DataFrame], Figure] | None = None
    stem: str = ""
    """Name of the files of its figure and table; if empty, none are written."""
    drawn: Reshape = _as_measured
    """The rows that the figure shows."""
    tested_on: Callable[[pd.DataFrame], str] | None = None
    """Says which windows and items its rows are of, where they say it themselves."""

    @property
    def script(self) -> str:
        """The script in `benchmarks/` that measures it."""
        return f"{self.measured_by or self.name}.py"

    @property
    def results(self) -> str:
        """Path of the committed results, relative to the project's folder."""
        return f"benchmarks/results/{self.name}.csv"

    @property
    def path(self) -> Path:
        """Path of the results."""
        return paths.project_dir() / self.results

    def rows(self) -> pd.DataFrame:
        """The results, as measured."""
        return pd.read_csv(self.path)

    def machine(self) -> dict[str, Any]:
        """The machine and versions that the results were measured with."""
        text = self.path.with_suffix(".json").read_text(encoding="utf-8")
        details: dict[str, Any] = json.loads(text)
        return details

    def measured_on(self, rows: pd.DataFrame) -> str:
        """Models, text and machine of some of the rows, in words."""
        machine = self.machine()
        tested = [self.tested_on(rows)] if self.tested_on else []
        # Before the windows were spread, they were the first ones of a split.
        before = {"seq_len": PROFILES["lab"].seq_len, "test_windows": "the first"}
        fields = before | machine
        counted = [_SAID[key].format_map(fields) for key in _SAID if key in machine]
        device = f"{machine['device']} with {machine['n_cpus']} CPUs"
        if "device" in rows:
            device = listed(dict.fromkeys(rows["device"].dropna()))
        where = (
            f"{machine['date'][:10]}, {device}, torch {machine['versions']['torch']}"
        )
        return "; ".join(filter(None, [*_of_rows(rows), *counted, *tested, where]))


_SAID = {
    "calibration": "calibrated on {calibration}",
    "n_windows": "{n_windows} calibration windows of {seq_len} tokens",
    "n_test": "{n_test} test windows of {seq_len} tokens of a corpus ({test_windows})",
    "n_items": "{n_items} items of a task",
    "n_threads": "threads: {n_threads}",
}
"""What is told of the details of results, by their names."""


def _of_rows(rows: pd.DataFrame) -> list[str]:
    """The models of results, and over how many draws of the text they are means."""
    facts = [", ".join(rows["model"].dropna().unique())] if "model" in rows else []
    if {"variant", "seed"} <= {*rows.columns}:
        draws = rows.groupby("variant")["seed"].nunique()
        plural = "s" if draws.max() > 1 else ""
        facts.append(
            f"{value_range(draws, 'd')} draw{plural} of the calibration windows"
        )
    return facts


def _with_pretrained(rows: pd.DataFrame) -> pd.DataFrame:
    return methods.with_pretrained(methods.methods_data(rows), results_of("real"))


def _pretrained_on(_rows: pd.DataFrame) -> str:
    """What the losses of the pretrained MoE beside the lab models' are of."""
    tested = real.fewest_windows(real.first_states(results_of("real")))
    return (
        f"{real.MODEL}: calibrated on {BENCHMARKS['real'].machine()['calibration']}, "
        f"of {real.FITTED_TO}; {tested} test windows of it, spread evenly"
    )


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        benchmark.name: benchmark
        for benchmark in (
            Benchmark(
                "real",
                "What pruning costs pretrained models",
                arguments=" --windows 0 --items 400",
                table=real.real_table,
                figure=real.figure_real,
                stem="17_real",
                drawn=real.front_states,
                tested_on=real.tested_on,
            ),
            Benchmark("tasks", "What the seven tasks cost, item by item"),
            Benchmark(
                "cost",
                "What scoring costs",
                table=cost.cost_table,
                data=cost.cost_data,
                figure=cost.figure_cost,
                stem="9_cost",
            ),
            Benchmark(
                "gpu",
                "What scoring costs on a GPU",
                table=cost.gpu_table,
                tested_on=cost.gpu_tested_on,
            ),
            Benchmark(
                "structures",
                "What a structure costs on the lab model",
                table=structures.structures_table,
                data=structures.structures_data,
                figure=structures.figure_structures,
                stem="10_structures",
            ),
            Benchmark(
                "quality",
                "Better at the same ratio: several models",
                table=quality.models_table,
                data=quality.models_data,
                figure=quality.figure_models,
                stem="11_models",
                tested_on=quality.models_pooled,
            ),
            Benchmark(
                "healing",
                "Healing a pruned model",
                table=quality.healing_table,
            ),
            Benchmark(
                "methods",
                "Every method on the same models and text",
                table=methods.methods_table,
                data=_with_pretrained,
                figure=methods.figure_methods,
                stem="15_methods",
                tested_on=_pretrained_on,
            ),
            Benchmark(
                "similarity",
                "How alike the experts of a layer are",
                table=methods.similarity_table,
            ),
            Benchmark(
                "method_twins",
                "Methods beside plain restatements of their public code",
                table=methods.twins_table,
            ),
            Benchmark(
                "solves",
                "What compress costs at true widths",
                table=cost.solves_table,
            ),
            Benchmark(
                "streaming",
                "A layer at a time from disk, beside all in memory",
                table=streaming.streaming_table,
            ),
            Benchmark(
                "quantised",
                "Pruned, quantised, or both",
                table=quantised.quantised_table,
                data=quantised.quantised_data,
                figure=quantised.figure_quantised,
                stem="16_quantised",
            ),
            Benchmark(
                "speed",
                "How fast sliced experts run",
                table=speed.speed_table,
            ),
            Benchmark(
                "speed_gpu",
                "How fast sliced experts run on a GPU",
                table=speed.speed_table,
                measured_by="gpu",
                arguments="--parts ragged",
            ),
            Benchmark(
                "serving",
                "How fast vLLM serves pruned models",
                table=speed.serving_table,
            ),
            Benchmark(
                "serving_bfloat16",
                "How fast vLLM serves pruned models in bfloat16",
                table=speed.serving_table,
                measured_by="serving",
            ),
            Benchmark(
                "panel",
                "How fast the panel answers",
                table=speed.panel_table,
                measured_by="latency_browser",
            ),
            Benchmark(
                "first_minute",
                "The first minute of a user",
                table=speed.first_minute_table,
            ),
            Benchmark("tables", "Importance tables of large models"),
        )
    }
)
"""Every benchmark by name, in the order of `benchmarks/README.md`."""


def results_of(name: str) -> pd.DataFrame:
    """The committed results of a benchmark, as measured."""
    return BENCHMARKS[name].rows()


def rows_beside(name: str, part: str) -> pd.DataFrame:
    """Rows beside the results of a benchmark, such as the windows of `real`."""
    path = BENCHMARKS[name].path
    return pd.read_parquet(path.with_name(f"{path.stem}_{part}.parquet"))


def measured() -> dict[str, pd.DataFrame]:
    """What is shown of every benchmark, by name: the data of its figure and table."""
    return {name: row.data(row.rows()) for name, row in BENCHMARKS.items()}
