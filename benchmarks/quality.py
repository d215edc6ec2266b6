"""What each addition to the paper's method gains, at equal atoms.

    python benchmarks/quality.py [--models lab,unbalanced,fine,biased,upcycled]
        [--seeds 0,1,2] [--variants "heapr,compress"]

Δloss in nats per token of masked and of compensated models, on held-out test windows,
with its standard error over windows, and that of the difference to HEAPr. Models are
calibrated on each of two corpora (and, for one seed, on a mixture of both) and tested
on both. Every variant is measured at 20, 40, 60 and 80 % of the atoms with the first
seed; HEAPr and `compress`, with and without self-generated text, with every seed and at
10 %, too. Costs are passes over the calibration set; seconds are without what an
earlier row of the same windows has computed. Rows are written one by one, so that a
stopped run resumes where it was.
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import Rows
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import savings_of
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import ReplacedDownProj, masking
from heapr_lab.recipes.weights import METHODS
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.storage import paths
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench, open_workbench

RATIOS = (0.1, 0.2, 0.4, 0.6, 0.8)
ON_MIXTURE = (0.4, 0.6)
CORPORA = ("pydocs", "wikitext2")
MIXTURE = "0.5*pydocs + 0.5*wikitext2"


@dataclass(frozen=True)
class Variant:
    """One way to prune."""

    name: str
    choice: dict[str, Any]
    """How atoms are selected: fields of `Selection`."""
    weights: str = "unchanged"
    """"unchanged", "compensated" within a layer, or "compress"."""
    own_text: bool = False
    """Whether the model writes more calibration windows itself, as by default."""


VARIANTS = (
    Variant("heapr", {}),
    Variant("compress", {}, "compress"),
    Variant("heapr + own text", {}, own_text=True),
    Variant("compress + own text", {}, "compress", own_text=True),
    Variant("heapr-L", {"scope": "layer"}),
    Variant("experts", {"granularity": "expert"}),
    Variant("fisher", {"estimator": "fisher"}),
    *(
        Variant(f"{name} + compensation", {"estimator": name}, "compensated")
        for name in ("heapr", "fisher", "elimination")
    ),
    Variant("heapr_total", {"estimator": "heapr_total"}),
)
PASSES = {"statistics": 3, "sums": 1, "compress": 3.75}
"""Costs in forward passes; a backward pass counts as two.

Elimination and compensation use the same sums. `compress` fits to three quarters of the
windows (3 of 4 passes), and takes three losses on each of the two eighths that are
left. Where HEAPr's mask is returned, the statistics of these windows, 3 of 4 passes,
take the place of the last three losses, and are not counted.
"""
MAIN = ("heapr", "heapr + own text", "compress", "compress + own text")
"""Variants that are also measured at the lowest ratio, and with every seed."""


class Measured:
    """Statistics, sums and test losses of one calibration set, computed once."""

    def __init__(self, bench: Workbench, calibration: Calibration) -> None:
        self.bench, self.calibration = bench, calibration
        self.kept: dict[Any, Any] = {}

    def windows(self, own_text: bool = False) -> CalibrationSet:
        """The calibration windows; with more that the model writes itself if asked."""
        share = METHODS["best"].recipe.own_text if own_text else 0.0
        calibration = dataclasses.replace(self.calibration, own_text=share)
        return self.bench.calibration_set(calibration)

    def model(self, own_text: bool = False, *, part: bool = False) -> CalibratedModel:
        """Statistics and sums on the windows, or the part that `compress` fits to."""
        key = "model", own_text, part
        if key not in self.kept:
            windows = self.windows(own_text)
            windows = windows.three_parts()[0] if part else windows
            calibrated = CalibratedModel(
                self.bench.model, windows, measure=self.bench.measure
            )
            self.kept[key] = calibrated
        model: CalibratedModel = self.kept[key]
        return model

    def table(self) -> Any:
        """The statistics of every atom."""
        return self.model().table()

    def _made(
        self, variant: Variant, selection: Selection
    ) -> tuple[KeepMask, ReplacedDownProj | None]:
        calibrated = self.model(variant.own_text)
        if variant.weights == "unchanged":
            return calibrated.keep(selection), None
        keep, compensation = calibrated.compensated(selection)
        return keep, compensation.down_projs

    def losses(
        self,
        corpus: str,
        keep: KeepMask | None,
        down_projs: ReplacedDownProj | None = None,
    ) -> torch.Tensor:
        """The loss on each test window of `corpus`."""
        ids = self.bench.test_windows(corpus).ids
        masked: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if keep is not None:
            masked = masking(self.bench.model, keep, down_projs)
        with masked:
            losses = evaluate_perplexity(self.bench.model, ids).windows
        return torch.tensor(losses, dtype=torch.float64)

    def reference(self, corpus: str, ratio: float | None) -> torch.Tensor:
        """The losses of HEAPr at a ratio, or of the dense model."""
        key = "reference", corpus, ratio
        if key not in self.kept:
            keep = None if ratio is None else select(self.table(), ratio=ratio)
            self.kept[key] = self.losses(corpus, keep)
        losses: torch.Tensor = self.kept[key]
        return losses

    def pruned(
        self, variant: Variant, ratio: float
    ) -> tuple[KeepMask, ReplacedDownProj | None, dict[str, Any]]:
        """Mask, weights in place of W_down, and what they cost."""
        began = time.perf_counter()
        selection = Selection(ratio, **variant.choice)
        model = self.bench.model
        cost: dict[str, Any] = {
            "passes": PASSES["statistics"]
            + PASSES["sums"] * (variant.weights != "unchanged"),
            "chosen": "",
        }
        if variant.weights == "compress":
            extra = variant.own_text
            part = self.model(extra, part=True)
            best = fit_compression(model, self.windows(extra), selection, fitted=part)
            keep, down_projs = best.keep, best.down_projs
            cost["passes"] = PASSES["compress"]
            report: Any = best.report  # which `compress` always has
            cost["chosen"] = report.loc[report["chosen"], "made"].item()
        else:
            keep, down_projs = self._made(variant, selection)
        if variant.own_text:  # more windows, and writing them
            share = METHODS["best"].recipe.own_text
            cost["passes"] = (1 + share) * cost["passes"] + share
        return keep, down_projs, cost | {"seconds": time.perf_counter() - began}


def runs(
    variants: list[Variant], seeds: list[int]
) -> Iterator[tuple[str, int, Variant, float]]:
    """Every (calibration, seed, variant, ratio) to measure."""
    for seed in seeds:
        for corpus in CORPORA:
            for variant in variants:
                if seed != seeds[0] and variant.name not in MAIN:
                    continue
                for ratio in RATIOS:
                    if ratio != RATIOS[0] or variant.name in MAIN:
                        yield corpus, seed, variant, ratio
    for variant in variants:
        for ratio in ON_MIXTURE if not variant.own_text else ():
            yield MIXTURE, seeds[0], variant, ratio


def measure(measured: Measured, variant: Variant, ratio: float) -> list[dict[str, Any]]:
    """Rows: the loss on every test corpus."""
    keep, down_projs, cost = measured.pruned(variant, ratio)
    table = measured.table()
    saved = savings_of(keep, table)
    rows = []
    for corpus in CORPORA:
        losses = measured.losses(corpus, keep, down_projs).tolist()
        paper, dense = (
            measured.reference(corpus, share).tolist() for share in (ratio, None)
        )
        against, stderr = paired_difference(losses, paper)
        change, change_stderr = paired_difference(losses, dense)
        rows.append(
            {
                "test": corpus,
                "achieved_ratio": keep.achieved_ratio,
                "routed_flops_reduction": saved["routed_flops_reduction"],
                "nll": statistics.fmean(losses),
                "delta_nll": change,
                "delta_nll_stderr": change_stderr,
                "against_paper": against,
                "stderr": stderr,
                **cost,
            }
        )
    return rows


def model_folder(name: str) -> str:
    """The model of a recipe, or any other by its name or folder."""
    folder = paths.lab_model_dir(name)
    return str(folder) if folder.is_dir() else name


def bench_of(name: str) -> Workbench:
    """The workbench of such a model, in float32 and with the windows of the lab's."""
    return open_workbench(
        model_folder(name), device="cpu", dtype="float32", profile="lab"
    )


def main() -> None:
    """Measure all variants and write the table."""
    parser = argparse.ArgumentParser(description="Measure what additions are worth.")
    parser.add_argument("--models", default="lab,unbalanced,fine,biased,upcycled")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--variants", default="", help="by default all")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    names = options.variants.split(",") if options.variants else []
    variants = [v for v in VARIANTS if not names or v.name in names]
    for name in options.models.split(","):
        measure_model(name, variants, seeds)


def measure_model(name: str, variants: list[Variant], seeds: list[int]) -> None:
    """Measure what has no rows yet on one model, and add it to the table."""
    bench = bench_of(name)
    rows, details = Rows("quality"), {"n_test": bench.profile.n_test}
    measured: Measured | None = None
    for corpus, seed, variant, ratio in runs(variants, seeds):
        key = {
            "calibration": corpus,
            "seed": seed,
            "variant": variant.name,
            "ratio": ratio,
            "model": f"{name} model",
        }
        calibration = Calibration(corpus, seed=seed)
        if measured is None or measured.calibration != calibration:
            measured = Measured(bench, calibration)
        if not rows.has(key):
            new = measure(measured, variant, ratio)
            rows.add([key | row for row in new], details)


if __name__ == "__main__":
    main()
