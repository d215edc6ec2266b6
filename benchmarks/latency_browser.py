"""The time from a key press in JupyterLab to the new picture, for large tables.

python -m benchmarks.latency_browser

A real browser moves the panel's slider with the arrow key, thirty times in succession,
for two tables of random statistics: one of 300 thousand atomic experts, and one with
the shape of Qwen3-30B-A3B. The results are written to `results/panel.csv`.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, machine, write_results
from benchmarks.tables import random_frame
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.architecture import Architecture, LayerShape

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser.pages import Panel, browser, run_all
from browser.servers import CHROMIUM, lab

SHAPES = {"300 thousand": (24, 64, 192), "Qwen3-30B-A3B": (48, 128, 768)}
"""Layers, experts of each, atoms of each."""
N_PRESSES = 30
CELL = """\
from heapr_lab import ImportanceTable, explore
explore(ImportanceTable.read({path!r}))"""


def random_table(n_layers: int, n_experts: int, d_inter: int) -> ImportanceTable:
    """A table of random sums, with an architecture of that shape."""
    names = ("sum_h2", "sum_g2", "sum_ph2", "max_abs_ph", "w_down_sq")
    frame = random_frame((n_layers, n_experts, d_inter), names)
    shape = LayerShape(n_experts=n_experts, d_inter=d_inter, d_expert=2048)
    layers = dict.fromkeys(range(n_layers), shape)
    parameters = 10**9 + len(frame) * 3 * 2048
    model = Architecture(parameters, 2, 8, layers, 5000, 16)
    return ImportanceTable.from_frame(frame, architecture=model.to_dict())


def measure(table: ImportanceTable, folder: Path, *, executable: str) -> list[float]:
    """Milliseconds from each key press to its picture."""
    path = folder / "table.parquet"
    table.write(path)
    cells = [CELL.format(path=str(path))]
    with (
        lab(private=folder, environment={}) as server,
        browser(executable) as chromium,
    ):
        page = chromium.new_page(viewport={"width": 1280, "height": 1400})
        page.goto(server.notebook("panels", cells))
        run_all(page)
        panel = Panel(page.locator(".jp-Notebook .jp-Cell").first)
        panel.is_ready()
        panel.time_presses(["ArrowRight"])  # the first one ranks the atoms
        times: list[float] = panel.time_presses(["ArrowRight"] * N_PRESSES)
        return times


def row(name: str, *, executable: str) -> dict[str, Any]:
    """Median and 95th percentile for one table."""
    table = random_table(*SHAPES[name])
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(table, Path(folder), executable=executable)
    return {
        "table": name,
        "atoms": table.n_atoms,
        "presses": N_PRESSES,
        "median_ms": round(statistics.median(taken), 1),
        "p95_ms": round(statistics.quantiles(taken, n=20)[-1], 1),
    }


def main() -> None:
    """Measure both tables and write the results.

    Raises:
        SystemExit: there is no browser.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    if CHROMIUM is None:
        raise SystemExit("found no chromium; install it: apt-get install chromium")
    rows = [row(name, executable=CHROMIUM) for name in SHAPES]
    write_results("panel", rows, machine(), out)


if __name__ == "__main__":
    main()
