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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine, write_results
from heapr_lab.importance.columns import KEYS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.selection import select

COLUMNS = ("tokens", "sum_h2", "sum_g2")
"""The columns that the paper's score needs."""


@dataclass(frozen=True)
class Layout:
    """The routed experts of a model."""

    name: str
    n_layers: int
    n_experts: int
    d_inter: int

    @property
    def n_atoms(self) -> int:
        """Rows of its table."""
        return self.n_layers * self.n_experts * self.d_inter


LAYOUTS = (
    Layout("Qwen3-30B-A3B", 48, 128, 768),
    Layout("DeepSeek-V3", 58, 256, 2048),
)


def random_table(layout: Layout) -> ImportanceTable:
    """A table of sums that span some decades, as measured ones do."""
    generator = np.random.default_rng(0)
    shape = layout.n_layers, layout.n_experts, layout.d_inter
    layer, expert, atom = np.indices(shape, dtype=np.int32).reshape(3, -1)
    tokens = generator.integers(1, 1 << 20, shape[:2]).repeat(layout.d_inter)
    columns = {
        name: generator.lognormal(0, 3, layout.n_atoms).astype(np.float32)
        for name in ("sum_h2", "sum_g2", "sum_hg2", "sum_ph2")
    }
    keys = {"layer": layer, "expert": expert, "atom": atom}
    frame = pd.DataFrame({**keys, "tokens": tokens, **columns})
    return ImportanceTable.from_frame(frame, N=1 << 20)


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(layout: Layout, folder: Path, n_repeats: int) -> dict[str, Any]:
    """One row: reading and selecting."""
    path = folder / f"{layout.name}.parquet"
    random_table(layout).write(path)
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
        "model": layout.name,
        "atoms": layout.n_atoms,
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
        rows = [measure(c, Path(folder), options.n_repeats) for c in LAYOUTS]
    write_results("tables", rows, details)


if __name__ == "__main__":
    main()
