"""Our benchmarks: a row for each table of results written by scripts in `benchmarks/`.

A reproduction does not repeat the measurements: it draws their results, writes the
tables, and fills the sections of `figures/README.md`, all from the rows below. A new
benchmark needs one script and one row.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from heapr_lab import figures
from heapr_lab.storage import paths

Reshape = Callable[[pd.DataFrame], pd.DataFrame]
Draw = Callable[[pd.DataFrame], Figure]


def _as_measured(rows: pd.DataFrame) -> pd.DataFrame:
    return rows


def _cost_data(rows: pd.DataFrame) -> pd.DataFrame:
    return figures.cost_data(rows, baseline="plain")


@dataclass(frozen=True)
class Benchmark:
    """A table of results, and how it is presented."""

    name: str
    """Name of its files `benchmarks/results/NAME.csv` and .json, and of its block."""
    script: str
    """The script in `benchmarks/` that measures it."""
    title: str
    """Heading of its section in `figures/README.md`."""
    table: Reshape = _as_measured
    """Makes the table for readers from the rows of `data`."""
    data: Reshape = _as_measured
    """Makes the rows of the figure and the table from the results."""
    figure: Draw | None = None
    stem: str = ""
    """Name of the files of its figure and table; if empty, none are written."""
    of_one_model: bool = False
    """Whether it is shown only if the model that it measured is reproduced."""

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


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        benchmark.name: benchmark
        for benchmark in (
            Benchmark(
                "real",
                "real.py",
                "What pruning costs pretrained models",
                table=figures.real_table,
            ),
            Benchmark("tasks", "tasks.py", "What the seven tasks cost, item by item"),
            Benchmark(
                "cost",
                "cost.py",
                "What scoring costs",
                table=figures.cost_table,
                data=_cost_data,
                figure=figures.figure_cost,
                stem="9_cost",
            ),
            Benchmark(
                "structures",
                "structures.py",
                "What a structure costs on the lab model",
                table=figures.structures_table,
                data=figures.structures_data,
                figure=figures.figure_structures,
                stem="10_structures",
                of_one_model=True,
            ),
            Benchmark(
                "structures_wide",
                "structures.py",
                "What a structure costs on the wide lab model",
                table=figures.structures_table,
                data=figures.structures_data,
            ),
            Benchmark(
                "quality_models",
                "quality.py",
                "Better at the same ratio: several models",
                table=figures.models_table,
                data=figures.models_data,
                figure=figures.figure_models,
                stem="11_models",
            ),
            Benchmark(
                "beyond",
                "beyond.py",
                "After compress: biases, distillation, recovery, and text of one's own",
                table=figures.beyond_table,
            ),
            Benchmark(
                "methods",
                "methods.py",
                "Every method on the same models and text",
                table=figures.methods_table,
                data=figures.methods_data,
                figure=figures.figure_methods,
                stem="15_methods",
            ),
            Benchmark(
                "method_twins",
                "method_twins.py",
                "Methods beside plain restatements of their public code",
            ),
            Benchmark(
                "solves",
                "solves.py",
                "What compress costs at true widths",
                table=figures.solves_table,
            ),
            Benchmark(
                "streaming",
                "streaming.py",
                "A layer at a time from disk, beside all in memory",
                table=figures.streaming_table,
            ),
            Benchmark(
                "growth",
                "growth.py",
                "How cost grows",
                table=figures.growth_table,
                data=figures.growth_data,
                figure=figures.figure_growth,
                stem="14_growth",
            ),
            Benchmark(
                "quality",
                "quality.py",
                "Additions one by one, the lab model",
                table=figures.quality_table,
                data=figures.quality_data,
                figure=figures.figure_quality,
                stem="11_quality",
                of_one_model=True,
            ),
            Benchmark(
                "quality_accuracy",
                "quality.py",
                "Accuracy of the lab model",
                table=figures.accuracy_table,
                of_one_model=True,
            ),
            Benchmark(
                "quality_wide",
                "quality.py",
                "Additions one by one, the wide model (ridges of before 2026-11-22)",
                table=figures.quality_table,
                data=figures.quality_data,
                figure=figures.figure_quality,
                stem="11_quality_wide",
            ),
            Benchmark(
                "quality_wide_accuracy",
                "quality.py",
                "Accuracy of the wide lab model",
                table=figures.accuracy_table,
            ),
            Benchmark(
                "learned",
                "learned.py",
                "What training adds",
                table=figures.learned_table,
                of_one_model=True,
            ),
            Benchmark(
                "outliers",
                "outliers.py",
                "Atoms that carry a capability alone",
                table=figures.outliers_table,
                of_one_model=True,
            ),
            Benchmark(
                "quantised",
                "quantised.py",
                "Pruned, quantised, or both",
                table=figures.quantised_table,
                data=figures.quantised_data,
                figure=figures.figure_quantised,
                stem="16_quantised",
            ),
            Benchmark(
                "damage",
                "damage.py",
                "Predicting the loss",
                table=figures.damage_table,
                data=figures.damage_data,
                figure=figures.figure_damage,
                stem="13_damage",
                of_one_model=True,
            ),
            Benchmark(
                "speed",
                "speed.py",
                "How fast sliced experts run",
                table=figures.speed_table,
            ),
            Benchmark(
                "serving",
                "serving.py",
                "How fast vLLM serves pruned models",
                table=figures.serving_table,
            ),
            Benchmark(
                "serving_bfloat16",
                "serving.py",
                "How fast vLLM serves pruned models in bfloat16",
                table=figures.serving_table,
            ),
            Benchmark(
                "panel",
                "latency_browser.py",
                "How fast the panel answers",
                table=figures.panel_table,
            ),
            Benchmark("tables", "tables.py", "Importance tables of large models"),
        )
    }
)
"""Every benchmark by name, in the order of `figures/README.md`."""


def results_of(name: str) -> pd.DataFrame:
    """The committed results of a benchmark, as measured."""
    return BENCHMARKS[name].rows()


def measured_for(model: str) -> dict[str, pd.DataFrame]:
    """Rows of every benchmark that is shown beside the figures of a model.

    Args:
        model: its name; benchmarks of one model are left out beside another one.

    Returns:
        By name; a benchmark that was not run has no entry.
    """
    there = [one for one in BENCHMARKS.values() if one.path.exists()]
    found = {one.name: one.rows() for one in there}
    return {
        name: BENCHMARKS[name].data(rows)
        for name, rows in found.items()
        if not BENCHMARKS[name].of_one_model or set(rows["model"]) == {model}
    }
