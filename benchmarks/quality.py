"""What each addition to the paper's method gains, at equal atoms and equal FLOPs.

    python benchmarks/quality.py [--model lab] [--name quality] [--seeds 0,1,2]
        [--variants "heapr,shrunk + compensation"]

Δloss in nats per token of masked and of compensated models, on held-out test windows.
Models are calibrated on each of two corpora (and, for one seed, on a mixture of both)
and tested on both. Every variant is measured at 20, 40, 60 and 80 % of the atoms; at 40
and 60 %, variants that select other atoms than the paper are also measured at as many
routed FLOPs saved as the paper's mask saves. Costs are passes over the calibration set
and seconds. For the main variants the accuracy on the continuation task of the
calibrated corpus is written to a file of its own (NAME_accuracy). Rows are written one
by one, so that a stopped run resumes where it was.
"""

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import Rows
from heapr_lab.evaluation.harness import continuation_task, run_tasks
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.activation_grams import (
    LayerGrams,
    collect_grams,
    default_span,
)
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import find_experts
from heapr_lab.models.loading import LAB
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.savings import savings_of
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import ReplacedDownProj, masking
from heapr_lab.refinement.compensation import solve_layers
from heapr_lab.refinement.elimination import with_elimination
from heapr_lab.refinement.iterative import prune_in_rounds
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.text.corpora import load_corpus
from heapr_lab.workbench.workbench import Workbench, open_workbench

RATIOS = (0.2, 0.4, 0.6, 0.8)
AT_EQUAL_FLOPS = (0.4, 0.6)
CORPORA = ("pydocs", "wikitext2")
MIXTURE = "0.5*pydocs + 0.5*wikitext2"
N_TEST = 24
N_ITEMS = 160
N_ROUNDS = 2


@dataclass(frozen=True)
class Variant:
    """One way to prune."""

    name: str
    choice: dict[str, Any]
    """How atoms are selected: arguments of `select`."""
    span: str | None = None
    """Of the compensation; None for none."""
    rounds: int = 1
    labels: str = "data"
    every_seed: bool = True
    accuracy: bool = False
    """Whether accuracy is measured as well as loss."""


VARIANTS = (
    Variant("heapr", {}, accuracy=True),
    Variant("heapr-L", {"scope": "layer"}, accuracy=True),
    Variant("experts", {"granularity": "expert"}, accuracy=True),
    Variant("fisher", {"estimator": "fisher"}),
    Variant("weighted", {"estimator": "weighted"}),
    Variant("shrunk", {"estimator": "shrunk"}, accuracy=True),
    Variant("heapr + compensation", {}, span="layer", accuracy=True),
    Variant(
        "shrunk + compensation", {"estimator": "shrunk"}, span="layer", accuracy=True
    ),
    Variant(
        "elimination + compensation",
        {"estimator": "elimination"},
        span="layer",
        accuracy=True,
    ),
    Variant(
        "shrunk + compensation + rounds",
        {"estimator": "shrunk"},
        span="layer",
        rounds=N_ROUNDS,
    ),
    Variant("heapr_total", {"estimator": "heapr_total"}, every_seed=False),
    Variant("taylor", {"estimator": "taylor"}, every_seed=False),
    Variant("camera", {"estimator": "camera", "scope": "layer"}, every_seed=False),
    Variant("magnitude", {"estimator": "magnitude"}, every_seed=False),
    Variant("frequency", {"estimator": "frequency"}, every_seed=False),
    Variant("random", {"estimator": "random"}, every_seed=False),
    Variant("heapr + rounds", {}, rounds=N_ROUNDS, every_seed=False),
    Variant("heapr, model's labels", {}, labels="model", every_seed=False),
    Variant(
        "fisher, model's labels",
        {"estimator": "fisher"},
        labels="model",
        every_seed=False,
    ),
    Variant("heapr, outliers protected", {"protect_outliers": 0.001}, every_seed=False),
    Variant("heapr + compensation in experts", {}, span="expert", every_seed=False),
)
OTHER_ATOMS = ("shrunk", "elimination")
"""Beginnings of the names of variants that are also measured at equal FLOPs."""
PASSES = {"statistics": 3, "sampled labels": 1, "sums": 1}
"""Costs in forward passes; a backward pass counts as two.

Elimination and compensation use the same sums.
"""


class Measured:
    """Statistics and sums of one calibration set, each computed once and timed."""

    def __init__(self, bench: Workbench, calibration: Calibration) -> None:
        self.bench, self.calibration = bench, calibration
        self.windows = bench.calibration_set(calibration)
        self.layers = find_experts(bench.model)
        self.seconds: dict[str, float] = {}
        self.kept: dict[str, Any] = {}

    def _timed(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self.kept:
            began = time.perf_counter()
            self.kept[name] = compute()
            self.seconds[name] = time.perf_counter() - began
        return self.kept[name]

    def table(self, labels: str = "data") -> ImportanceTable:
        """The statistics of every atom."""
        found: ImportanceTable = self._timed(
            f"statistics {labels}",
            lambda: collect_statistics(self.bench.model, self.windows, labels=labels),
        )
        return found

    def sums(self, span: str) -> dict[int, LayerGrams]:
        """The sums that compensation and elimination solve for weights."""
        found: dict[int, LayerGrams] = self._timed(
            f"sums {span}",
            lambda: collect_grams(self.bench.model, self.windows, span=span),
        )
        return found

    def eliminated(self) -> ImportanceTable:
        """The table with the scores of elimination, computed from `sums`."""
        grams = self.sums(default_span(self.layers))
        found: ImportanceTable = self._timed(
            "elimination",
            lambda: with_elimination(
                self.table(), ((own, grams[own.layer]) for own in self.layers)
            ),
        )
        return found

    def pruned(
        self, variant: Variant, ratio: float, **choice: Any
    ) -> tuple[KeepMask, ReplacedDownProj | None, dict[str, float]]:
        """Mask, weights in place of W_down, and what they cost."""
        table = self.table(variant.labels)
        if variant.choice.get("estimator") == "elimination":
            table = self.eliminated()
        cost = {
            "passes": PASSES["statistics"] * variant.rounds
            + PASSES["sampled labels"] * (variant.labels == "model")
            + PASSES["sums"] * (variant.span is not None),
            "seconds": self.seconds[f"statistics {variant.labels}"],
        }
        choice = variant.choice | choice
        if variant.rounds > 1:
            began = time.perf_counter()
            found = prune_in_rounds(
                self.bench.model,
                self.windows,
                ratio=ratio,
                rounds=variant.rounds,
                compensated=variant.span is not None,
                table=table,
                **choice,
            )
            cost["seconds"] += time.perf_counter() - began
            downs = found.compensation.downs if found.compensation else None
            return found.keep, downs, cost
        keep = select(table, ratio=ratio, **choice)
        if variant.span is None:
            return keep, None, cost
        span = default_span(self.layers) if variant.span == "layer" else variant.span
        grams = self.sums(span)
        began = time.perf_counter()
        solved = solve_layers(self.layers, keep, grams)
        cost["seconds"] += self.seconds[f"sums {span}"] + time.perf_counter() - began
        if table is not self.table(variant.labels):
            cost["seconds"] += self.seconds["elimination"]
        return keep, solved.downs, cost


def runs(
    variants: list[Variant], corpora: tuple[str, ...], seeds: list[int]
) -> Iterator[tuple[str, int, Variant, float, str]]:
    """Every (calibration, seed, variant, ratio, what is equal) to measure."""
    for corpus in corpora:
        for seed in seeds:
            for variant in variants:
                if seed != seeds[0] and not variant.every_seed:
                    continue
                for ratio in RATIOS:
                    yield corpus, seed, variant, ratio, "atoms"
                    if ratio in AT_EQUAL_FLOPS and variant.name.startswith(OTHER_ATOMS):
                        yield corpus, seed, variant, ratio, "flops"
                    if variant.accuracy:
                        yield corpus, seed, variant, ratio, "accuracy"
    for variant in variants:
        if variant.every_seed and variant.rounds == 1 and len(corpora) > 1:
            for ratio in AT_EQUAL_FLOPS:
                yield MIXTURE, seeds[0], variant, ratio, "atoms"


def accuracy(
    bench: Workbench, corpus: str, keep: KeepMask | None, downs: ReplacedDownProj | None
) -> tuple[float, float]:
    """Accuracy on the continuation task of `corpus`, and its standard error."""
    task = continuation_task(load_corpus(corpus, split="test"), n_items=N_ITEMS)
    masked = contextlib.nullcontext()
    if keep is not None:
        masked = masking(bench.model, keep, downs)
    with masked:
        frame = run_tasks(bench.model, bench.tokenizer, [task], batch_size=64)
    row = frame[frame["metric"].eq("acc")].iloc[0]
    return float(row["value"]), float(row["stderr"])


def measure_accuracy(
    bench: Workbench, measured: Measured, variant: Variant, ratio: float
) -> dict[str, Any]:
    """One row: accuracy on the calibrated corpus, dense and pruned."""
    corpus = measured.calibration.corpus
    dense = measured.kept.setdefault("dense", accuracy(bench, corpus, None, None))
    keep, downs, _ = measured.pruned(variant, ratio)
    value, stderr = accuracy(bench, corpus, keep, downs)
    return {
        "test": corpus,
        "achieved_ratio": keep.achieved_ratio,
        "accuracy": value,
        "stderr": stderr,
        "dense": dense[0],
        "n_items": N_ITEMS,
    }


def measure(
    bench: Workbench, measured: Measured, variant: Variant, ratio: float, equal: str
) -> list[dict[str, Any]]:
    """Rows: the loss on every test corpus."""
    table = measured.table()
    choice: dict[str, Any] = {}
    share = ratio
    if equal == "flops":
        paper = savings_of(select(table, ratio=ratio), table)
        share = round(float(paper["routed_flops_reduction"].iloc[0]), 9)
        choice = {"of": "flops"}
    keep, downs, cost = measured.pruned(variant, share, **choice)
    saved = savings_of(keep, table).iloc[0]
    rows = []
    for corpus in CORPORA:
        windows = bench.test_windows(corpus)
        with masking(bench.model, keep, downs):
            nll = evaluate_perplexity(bench.model, windows.ids).nll
        rows.append(
            {
                "test": corpus,
                "achieved_ratio": keep.achieved_ratio,
                "routed_flops_reduction": float(saved["routed_flops_reduction"]),
                "nll": nll,
                "delta_nll": nll - bench.perplexity(None, windows).nll,
                **cost,
            }
        )
    return rows


def main() -> None:
    """Measure all variants and write the tables."""
    parser = argparse.ArgumentParser(description="Measure what additions are worth.")
    parser.add_argument("--model", default=LAB)
    parser.add_argument("--name", default="quality", help="of the files written")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--corpora", default=",".join(CORPORA))
    parser.add_argument("--variants", default="", help="by default all")
    parser.add_argument(
        "--accuracy", default=True, action=argparse.BooleanOptionalAction
    )
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    asked = options.variants.split(",") if options.variants else []
    variants = [own for own in VARIANTS if not asked or own.name in asked]
    bench = open_workbench(options.model, device="cpu", dtype="float32", profile="lab")
    bench.profile = dataclasses.replace(bench.profile, n_test=N_TEST)
    losses, accuracies = Rows(options.name), Rows(f"{options.name}_accuracy")
    details = {"n_test": N_TEST, "n_items": N_ITEMS, "n_rounds": N_ROUNDS}
    measured: Measured | None = None
    for corpus, seed, variant, ratio, equal in runs(
        variants, tuple(options.corpora.split(",")), seeds
    ):
        if equal == "accuracy" and not options.accuracy:
            continue
        rows = accuracies if equal == "accuracy" else losses
        key = {
            "calibration": corpus,
            "seed": seed,
            "variant": variant.name,
            "ratio": ratio,
            "equal": "atoms" if equal == "accuracy" else equal,
            "model": bench.name,
        }
        if rows.has(key):
            continue
        calibration = Calibration(corpus, seed=seed)
        if measured is None or measured.calibration != calibration:
            measured = Measured(bench, calibration)
        if equal == "accuracy":
            found = [measure_accuracy(bench, measured, variant, ratio)]
        else:
            found = measure(bench, measured, variant, ratio, equal)
        rows.add([key | row for row in found], details)


if __name__ == "__main__":
    main()
