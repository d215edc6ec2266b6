"""What each addition to the paper's method is worth, at equal atoms and equal FLOPs.

    python benchmarks/quality.py [--model lab] [--name quality] [--seeds 0,1,2]

Δloss in nats per token on test windows that nothing was fitted to, of masks and of
compensated models, for calibration on each of two corpora (and, for one seed, on a
mixture of both), tested on both. Every variant is measured at 20, 40, 60 and 80 % of
the atoms; at 40 and 60 % those that choose other atoms than the paper are measured once
more with as many routed FLOPs saved as the paper's mask saves. Costs are passes over
the calibration set and seconds. Rows are written as they come, so that a run that was
stopped goes on where it was.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import RESULTS, machine, write_results
from heapr_lab import accounting
from heapr_lab.calibration import CalibrationSet
from heapr_lab.compensation import default_span, solve_layers
from heapr_lab.evaluation import evaluate_perplexity
from heapr_lab.experts import find_experts
from heapr_lab.grams import collect_grams
from heapr_lab.importance import collect_statistics
from heapr_lab.iterated import prune_in_rounds
from heapr_lab.masks import KeepMask
from heapr_lab.models import LAB
from heapr_lab.pipeline import Setting, Workbench, open_workbench
from heapr_lab.selection import select
from heapr_lab.surgery import Downs, masking
from heapr_lab.table import ImportanceTable

RATIOS = (0.2, 0.4, 0.6, 0.8)
AT_EQUAL_FLOPS = (0.4, 0.6)
CORPORA = ("pydocs", "wikitext2")
MIXTURE = "0.5*pydocs + 0.5*wikitext2"
N_TEST = 24
N_ROUNDS = 2


@dataclass(frozen=True)
class Variant:
    """One way to prune."""

    name: str
    choice: dict[str, Any]
    """How atoms are chosen, as `select`."""
    span: str | None = None
    """Of the compensation; None for none."""
    rounds: int = 1
    labels: str = "data"
    every_seed: bool = True


VARIANTS = (
    Variant("heapr", {}),
    Variant("heapr-L", {"scope": "layer"}),
    Variant("experts", {"granularity": "expert"}),
    Variant("fisher", {"estimator": "fisher"}),
    Variant("weighted", {"estimator": "weighted"}),
    Variant("shrunk", {"estimator": "shrunk"}),
    Variant("heapr + compensation", {}, span="layer"),
    Variant("shrunk + compensation", {"estimator": "shrunk"}, span="layer"),
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
PASSES = {"statistics": 3, "sampled labels": 1, "sums": 1}
"""Costs in forward passes, a backward counted as two."""


class Measured:
    """One calibration set: its statistics and sums, each made once and timed."""

    def __init__(self, bench: Workbench, windows: CalibrationSet) -> None:
        self.bench, self.windows = bench, windows
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

    def pruned(
        self, variant: Variant, ratio: float, **choice: Any
    ) -> tuple[KeepMask, Downs | None, dict[str, float]]:
        """Mask, weights in place of W_down, and what they cost."""
        table = self.table(variant.labels)
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
        grams = self._timed(
            f"sums {span}",
            lambda: collect_grams(self.bench.model, self.windows, span=span),
        )
        began = time.perf_counter()
        solved = solve_layers(self.layers, keep, grams)
        cost["seconds"] += self.seconds[f"sums {span}"] + time.perf_counter() - began
        return keep, solved.downs, cost


def runs(
    corpora: tuple[str, ...], seeds: list[int]
) -> Iterator[tuple[str, int, Variant, float, str]]:
    """Every (calibration, seed, variant, ratio, what is equal) to measure."""
    for corpus in corpora:
        for seed in seeds:
            for variant in VARIANTS:
                if seed != seeds[0] and not variant.every_seed:
                    continue
                for ratio in RATIOS:
                    yield corpus, seed, variant, ratio, "atoms"
                    if ratio in AT_EQUAL_FLOPS and variant.name.startswith("shrunk"):
                        yield corpus, seed, variant, ratio, "flops"
    for variant in VARIANTS:
        if variant.every_seed and variant.rounds == 1 and len(corpora) > 1:
            for ratio in AT_EQUAL_FLOPS:
                yield MIXTURE, seeds[0], variant, ratio, "atoms"


def measure(
    bench: Workbench, measured: Measured, variant: Variant, ratio: float, equal: str
) -> list[dict[str, Any]]:
    """Rows: the loss on every test corpus."""
    table = measured.table()
    choice: dict[str, Any] = {}
    share = ratio
    if equal == "flops":
        paper = accounting.summary(select(table, ratio=ratio), table, seq_len=256)
        share = round(float(paper["routed_flops_reduction"].iloc[0]), 9)
        choice = {"of": "flops"}
    keep, downs, cost = measured.pruned(variant, share, **choice)
    saved = accounting.summary(keep, table, seq_len=256).iloc[0]
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
    """Measure all variants and write the table down."""
    parser = argparse.ArgumentParser(description="Measure what additions are worth.")
    parser.add_argument("--model", default=LAB)
    parser.add_argument("--name", default="quality", help="of the files written")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--corpora", default=",".join(CORPORA))
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    bench = open_workbench(options.model, device="cpu", dtype="float32", profile="lab")
    bench.profile = dataclasses.replace(bench.profile, n_test=N_TEST)
    path = RESULTS / f"{options.name}.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    keys = ("calibration", "seed", "variant", "ratio", "equal")
    done = {tuple(row[key] for key in keys) for row in rows}
    held: tuple[Any, Measured | None] = (None, None)
    for corpus, seed, variant, ratio, equal in runs(
        tuple(options.corpora.split(",")), seeds
    ):
        key = (corpus, seed, variant.name, ratio, equal)
        if key in done:
            continue
        if held[0] != (corpus, seed):
            setting = Setting(0.0, calibration=corpus, seed=seed)
            windows = bench.calibration_set(setting)
            held = (corpus, seed), Measured(bench, windows)
        assert held[1] is not None
        found = measure(bench, held[1], variant, ratio, equal)
        own = dict(zip(keys, key, strict=True)) | {"model": bench.name}
        rows += [own | row for row in found]
        write_results(
            options.name, rows, machine() | {"n_test": N_TEST, "n_rounds": N_ROUNDS}
        )


if __name__ == "__main__":
    main()
