"""Text that the model writes itself, in place of calibration text.

    python benchmarks/beyond.py [--models lab,unbalanced,fine,biased] [--name beyond]

On each model, calibrated on pydocs, at 40 and 60 % of the atoms: Δloss on held-out text
of pydocs and WikiText-2. *own text* is calibrated on as many windows of self-generated
text: the dense model wrote them, from the first 8 tokens of windows of pydocs. Seconds
are CPU time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import Rows
from benchmarks.quality import bench_of
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.refinement.own_text import continuations
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench

RATIOS = (0.4, 0.6)
CORPUS, OTHER = "pydocs", "wikitext2"
N_OPENING = 8


@dataclass(frozen=True)
class Case:
    """One model at one ratio: what the variants are made of."""

    bench: Workbench
    windows: CalibrationSet
    ratio: float

    def heapr(self) -> Any:
        """Pruned as published."""
        table = self.bench.measure(self.windows)
        return prune(self.bench.model, select(table, ratio=self.ratio))

    def compress(self) -> Any:
        """Pruned by `compress`."""
        fit = fit_compression(self.bench.model, self.windows, ratio=self.ratio)
        return prune(self.bench.model, fit.keep, down_projs=fit.down_projs)


def own_text(bench: Workbench, windows: CalibrationSet) -> CalibrationSet:
    """As many windows, of which the model continues the openings of `windows`."""
    prompts = windows.ids[:, :N_OPENING]
    n_new = windows.seq_len - N_OPENING
    endings = continuations(bench.model, prompts, n_new=n_new, batch_size=64)
    ids = torch.cat([prompts, endings], dim=1)
    return CalibrationSet(ids, {"corpus": "own text"})


TEXTS: dict[str, Callable[[Workbench, CalibrationSet], CalibrationSet]] = {
    "": lambda _bench, windows: windows,
    ", own text": own_text,
}
"""What is calibrated on, by the ending of the variants' names."""


def measured(case: Case, model: Any) -> dict[str, Any]:
    """Losses on held-out text."""
    bench = case.bench
    row: dict[str, Any] = {}
    for corpus in (CORPUS, OTHER):
        ids = bench.test_windows(corpus).ids
        models = model, bench.model
        losses = [evaluate_perplexity(network, ids).windows for network in models]
        rise, stderr = paired_difference(*losses)
        row |= {f"delta_nll {corpus}": rise, f"stderr {corpus}": stderr}
    return row


def main() -> None:
    """Measure all variants on all models, and write each row."""
    parser = argparse.ArgumentParser(description="Measure what follows compress.")
    parser.add_argument("--models", default="lab,unbalanced,fine,biased")
    parser.add_argument("--name", default="beyond", help="of the files written")
    options = parser.parse_args()
    rows = Rows(options.name)
    for name in options.models.split(","):
        bench = bench_of(name)
        details = {"n_test": bench.profile.n_test}
        for suffix, text_of in TEXTS.items():
            missing = [
                ratio
                for ratio in RATIOS
                if not rows.has(_key(name, ratio) | {"variant": f"heapr{suffix}"})
            ]
            if missing:
                text = text_of(bench, bench.calibration_set(Calibration(CORPUS)))
            for ratio in missing:
                case = Case(bench, text, ratio)
                rows.add(_measured_rows(name, case, suffix), details)


def _key(name: str, ratio: float) -> dict[str, Any]:
    return {"model": f"{name} model", "ratio": ratio}


def _measured_rows(name: str, case: Case, suffix: str) -> list[dict[str, Any]]:
    """The rows of one model, text and ratio."""
    rows = []

    for label, make in (("heapr", case.heapr), ("compress", case.compress)):
        began = time.process_time()
        model = make()
        row = {**_key(name, case.ratio), "variant": label + suffix}
        row["cpu_seconds"] = round(time.process_time() - began, 1)
        rows.append(row | measured(case, model))
    return rows


if __name__ == "__main__":
    main()
