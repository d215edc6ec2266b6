"""Atoms that carry a capability alone, and whether any estimator prunes them.

    python benchmarks/outliers.py [--model lab] [--corpus pydocs]

Fisher-MoE (arXiv 2606.05538) reports that a dozen of 1.35 million atoms do. This
script measures Δloss in nats per token when only the twelve highest atoms by some
estimator are removed, compared with twelve random ones; and it counts how many of them
each estimator prunes at 20 to 80 %.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine, write_results
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.named import LAB
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

N_ATOMS = 12
RATIOS = (0.2, 0.4, 0.6, 0.8)
CHOSEN_BY = ("fisher", "heapr", "max_abs_ph", "random")
PRUNED_BY = ("heapr", "heapr_total", "fisher", "weighted", "shrunk", "magnitude")
TESTS = ("pydocs", "wikitext2")


def first_atoms(table: ImportanceTable, name: str) -> np.ndarray:
    """Rows of the atoms with the highest values of an estimator or a column."""
    known = name in table.frame
    values = table.column(name) if known else table.score(name).to_numpy()
    return np.argsort(values, kind="stable")[-N_ATOMS:]


def measure(bench: Workbench, name: str, corpus: str) -> dict[str, Any]:
    """One row: the cost of removing the atoms, and how many each estimator prunes."""
    table = bench.importance(Calibration(corpus))
    rows = first_atoms(table, name)
    keep = KeepMask.from_rows(table, ~np.isin(np.arange(table.n_atoms), rows))
    row: dict[str, Any] = {"model": bench.name, "first by": name, "atoms": N_ATOMS}
    row["of atoms"] = table.n_atoms
    for test in TESTS:
        windows = bench.test_windows(test)
        dense = bench.perplexity(None, windows).nll
        row[f"{test} Δloss"] = bench.perplexity(keep, windows).nll - dense
    for estimator in PRUNED_BY:
        for ratio in RATIOS:
            setting = Setting(ratio, estimator=estimator, calibration=corpus)
            pruned = ~bench.keep(setting).rows
            row[f"{estimator} at {ratio:g}"] = int(pruned[rows].sum())
    return row


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description="Look for atoms that matter alone.")
    parser.add_argument("--model", default=LAB)
    parser.add_argument("--corpus", default="pydocs")
    parser.add_argument("--name", default="outliers", help="of the files written")
    options = parser.parse_args()
    bench = open_workbench(options.model, device="cpu", dtype="float32", profile="lab")
    rows = [measure(bench, name, options.corpus) for name in CHOSEN_BY]
    write_results(options.name, rows, machine() | {"identity": bench.identity})


if __name__ == "__main__":
    main()
