"""What training adds: pruned models by scores, and recovery after each.

    python benchmarks/learned.py [--model lab] [--corpus pydocs] [--ratios 0.4,0.6]

Δloss in nats per token, on the test split of the corpus used for calibration and
training, of the masks of two scores, and of each after a recovery run on the same
calibration windows.

*Token passes* count how often the tokens of the calibration set went through a model,
forward or backward: twice for a score. A row of a recovery run has the cost of that run
alone. Seconds exclude those of the score, which are in the details. To add a way of
making a pruned model, add an entry to `METHODS`.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import Rows
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.named import LAB
from heapr_lab.progress import progress_bar
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement.compensation import compensate
from heapr_lab.refinement.recovery import recover
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

_SCORE_PASSES = 2


@dataclasses.dataclass(frozen=True)
class Steps:
    """Lengths, batch size and learning rate of the training runs."""

    recovery: int
    batch_size: int
    recovery_rate: float
    """The highest learning rate of a recovery run."""


@dataclasses.dataclass(frozen=True)
class Made:
    """A pruned model and what it cost to make."""

    model: nn.Module
    keep: KeepMask
    passes: float
    """Forward and backward passes, in calibration sets."""


def by_score(bench: Workbench, setting: Setting) -> Made:
    """Sliced by the ranks of the setting's estimator."""
    keep = bench.keep(setting)
    return Made(prune(bench.model, keep), keep, _SCORE_PASSES)


def by_compensation(bench: Workbench, setting: Setting) -> Made:
    """Sliced by the ranks of the setting's estimator and compensated."""
    keep = bench.keep(setting)
    made = compensate(bench.model, keep, bench.calibration_set(setting.calibration))
    return Made(made, keep, _SCORE_PASSES + 1)


def _step_passes(n_steps: int, steps: Steps, windows: CalibrationSet) -> float:
    """Forward and backward, in calibration sets."""
    return 2 * n_steps * steps.batch_size / windows.n_sequences


METHODS: dict[str, tuple[str, Callable[[Workbench, Setting], Made]]] = {
    "heapr": ("heapr", by_score),
    "fisher": ("fisher", by_score),
    "shrunk, compensated": ("shrunk", by_compensation),
}
"""For each method, the estimator and the function that makes the model."""


def measure(
    bench: Workbench, method: str, ratio: float, corpus: str, steps: Steps
) -> Iterator[dict[str, Any]]:
    """Two rows: the pruned model before and after a recovery run."""
    estimator, make = METHODS[method]
    setting = Setting(ratio, estimator=estimator, calibration=corpus)
    windows = bench.calibration_set(setting.calibration)
    clocks = time.perf_counter(), time.process_time()
    made = make(bench, setting)
    yield _row(bench, method, ratio, corpus, made, n_recovery=0, since=clocks)
    clocks = time.perf_counter(), time.process_time()
    with progress_bar(f"recovery of {method} at {ratio:g}", "step") as bar:
        recover(
            made.model,
            bench.model,
            windows,
            n_steps=steps.recovery,
            batch_size=steps.batch_size,
            learning_rate=steps.recovery_rate,
            progress=bar,
        )
    passes = 1 + _step_passes(steps.recovery, steps, windows)
    made = dataclasses.replace(made, passes=passes)
    n_recovery = steps.recovery
    yield _row(bench, method, ratio, corpus, made, n_recovery=n_recovery, since=clocks)


def _row(
    bench: Workbench,
    method: str,
    ratio: float,
    corpus: str,
    made: Made,
    *,
    n_recovery: int,
    since: tuple[float, float],
) -> dict[str, Any]:
    seconds, cpu = time.perf_counter() - since[0], time.process_time() - since[1]
    windows = bench.test_windows(corpus)
    dense = bench.perplexity(None, windows).nll
    found = evaluate_perplexity(made.model, windows.ids)
    return {
        "model": bench.name,
        "method": method,
        "ratio": ratio,
        "achieved_ratio": made.keep.achieved_ratio,
        "recovery_steps": n_recovery,
        "nll": found.nll,
        "delta_nll": found.nll - dense,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "token_passes": round(made.passes, 1),
        "n_tokens": found.n_tokens,
    }


def main() -> None:
    """Measure every method at every ratio and write the table."""
    parser = argparse.ArgumentParser(description="Measure what training adds.")
    parser.add_argument("--model", default=LAB)
    parser.add_argument("--corpus", default="pydocs")
    parser.add_argument("--ratios", default="0.4,0.6", help="with commas")
    parser.add_argument("--recovery-steps", type=int, default=40)
    parser.add_argument("--recovery-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--name", default="learned", help="of the files written")
    options = parser.parse_args()
    steps = Steps(
        recovery=options.recovery_steps,
        batch_size=options.batch_size,
        recovery_rate=options.recovery_rate,
    )
    bench = open_workbench(options.model, device="cpu", dtype="float32")
    table = bench.importance(Calibration(options.corpus))
    details = {
        "identity": bench.identity,
        "steps": dataclasses.asdict(steps),
        "score_seconds": table.metadata["provenance"]["seconds"],
    }
    rows = Rows(options.name)
    for ratio in map(float, options.ratios.split(",")):
        for method in METHODS:
            if not rows.has({"method": method, "ratio": ratio}):
                rows.add(measure(bench, method, ratio, options.corpus, steps), details)


if __name__ == "__main__":
    main()
