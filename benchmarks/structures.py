"""What each structure costs in quality, at equal numbers of atomic experts.

    python benchmarks/structures.py [--model lab] [--corpus pydocs] [--multiples 6,12]

Δloss in nats per token of masks of every structure at 20, 40 and 60 %, on the test
split of the corpus that importance was measured on. By default widths are multiples of
1/16, 1/8, 1/4 and 1/2 of d_inter; ragged widths are unrestricted. A coarse multiple
cannot meet a ratio exactly, so that each row also has the Δloss of ragged widths with
as many atoms kept; infeasible settings (one width of at least half, at 60 %) have no
row.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine, write_results
from heapr_lab.errors import SpecError
from heapr_lab.models.named import LAB
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

RATIOS = (0.2, 0.4, 0.6)
CONSTRAINED = ("aligned", "per_layer", "uniform")


def settings(multiples: list[int], corpus: str) -> list[Setting]:
    """Settings of ragged widths, and of every other structure with every multiple."""
    kinds: list[tuple[str, int | None]] = [("ragged", None)]
    kinds += [(name, multiple) for name in CONSTRAINED for multiple in multiples]
    return [
        Setting(ratio, structure=name, multiple=multiple, calibration=corpus)
        for name, multiple in kinds
        for ratio in RATIOS
    ]


def measure(bench: Workbench, setting: Setting, corpus: str) -> dict[str, Any] | None:
    """One row: the share of the atoms removed, and Δloss; None if infeasible."""
    windows = bench.test_windows(corpus)
    try:
        keep = bench.keep(setting)
    except SpecError:
        return None
    dense = bench.perplexity(None, windows).nll
    masked = bench.perplexity(keep, windows)
    same = Setting(keep.achieved_ratio, calibration=corpus)
    ragged = bench.perplexity(bench.keep(same), windows)
    return {
        "model": bench.name,
        "structure": setting.selection.structure,
        "multiple": setting.selection.multiple,
        "ratio": setting.selection.ratio,
        "achieved_ratio": keep.achieved_ratio,
        "nll": masked.nll,
        "delta_nll": masked.nll - dense,
        "ragged_delta_nll": ragged.nll - dense,
        "n_tokens": masked.n_tokens,
    }


def main() -> None:
    """Measure every structure and write the table."""
    parser = argparse.ArgumentParser(description="Measure what structures cost.")
    parser.add_argument("--model", default=LAB)
    parser.add_argument("--corpus", default="pydocs")
    parser.add_argument("--multiples", help="with commas; default: 1/16 … 1/2")
    options = parser.parse_args()
    bench = open_workbench(options.model, profile="lab", device="cpu", dtype="float32")
    shapes = bench.importance(Calibration(options.corpus)).shapes()
    d_inter = max(width for _, width in shapes.values())
    given = options.multiples or ",".join(str(d_inter // n) for n in (16, 8, 4, 2))
    multiples = [int(multiple) for multiple in given.split(",")]
    chosen = settings(multiples, options.corpus)
    measured = [measure(bench, setting, options.corpus) for setting in chosen]
    rows = [row for row in measured if row is not None]
    details = machine() | {
        "identity": bench.identity,
        "d_inter": d_inter,
        "n_test": bench.profile.n_test,
    }
    write_results("structures", rows, details)


if __name__ == "__main__":
    main()
