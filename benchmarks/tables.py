"""The time to read large importance tables, and to select at a new ratio.

    python benchmarks/tables.py [--n-repeats 5]

Tables of random sums with the shapes of two published models: Qwen3-30B-A3B (4.7 M
atomic experts) and DeepSeek-V3 with 671 B parameters (30.4 M). Reading is compared with
pyarrow reading the same columns of the same file, which is the lower bound.
"""

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.latency import timed
from benchmarks.machine import machine, write_results
from heapr_lab.importance.columns import KEYS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.selection import select

COLUMNS = ("tokens", "sum_h2", "sum_g2")
"""The columns that the paper's score needs."""
SUMS = ("sum_h2", "sum_g2", "sum_hg2", "sum_ph2")
LAYOUTS = {"Qwen3-30B-A3B": (48, 128, 768), "DeepSeek-V3": (58, 256, 2048)}
"""Layers, experts of each, atoms of each."""


def random_frame(shape: tuple[int, int, int], names: Sequence[str]) -> pd.DataFrame:
    """Rows of atoms, with columns of sums that span some decades, as measured ones."""
    generator = np.random.default_rng(0)
    keys = np.indices(shape, dtype=np.int32).reshape(3, -1)
    frame = pd.DataFrame(dict(zip(KEYS, keys, strict=True)))
    frame["tokens"] = generator.integers(1, 1 << 20, shape[:2]).repeat(shape[2])
    for name in names:
        frame[name] = generator.lognormal(0, 3, len(frame)).astype(np.float32)
    return frame


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of one call."""
    return timed(call, time.perf_counter)[1]


def measure(model: str, folder: Path, n_repeats: int) -> dict[str, Any]:
    """One row: reading and selecting."""
    path = folder / f"{model}.parquet"
    frame = random_frame(LAYOUTS[model], SUMS)
    ImportanceTable.from_frame(frame, N=1 << 20).write(path)
    del frame
    columns = [*KEYS, *COLUMNS]
    floor, read = [], []
    for _ in range(n_repeats):
        floor.append(seconds(lambda: pq.read_table(path, columns=columns).to_pandas()))
        read.append(seconds(lambda: ImportanceTable.read(path, COLUMNS)))
    table = ImportanceTable.read(path, COLUMNS)
    first = seconds(lambda: select(table, ratio=0.5))
    ratios = np.linspace(0.05, 0.95, 19)
    later = [seconds(functools.partial(select, table, ratio=float(r))) for r in ratios]
    return {
        "model": model,
        "atoms": table.n_atoms,
        "file [MB]": round(path.stat().st_size / 1e6),
        "pyarrow, same columns [s]": round(statistics.median(floor), 2),
        "read [s]": round(statistics.median(read), 2),
        "first selection [s]": round(first, 2),
        "next ratio, median [ms]": round(1e3 * statistics.median(later), 1),
        "next ratio, slowest [ms]": round(1e3 * max(later), 1),
    }


def main() -> None:
    """Measure both layouts and write the table."""
    parser = argparse.ArgumentParser(description="Measure reading and selecting.")
    parser.add_argument("--n-repeats", type=int, default=5)
    options = parser.parse_args()
    details = machine() | {"n_repeats": options.n_repeats}
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, Path(folder), options.n_repeats) for name in LAYOUTS]
    write_results("tables", rows, details)


if __name__ == "__main__":
    main()
