"""Every compression method on the same models, text and ratios.

    OMP_NUM_THREADS=1 python benchmarks/methods.py [--methods heapr,reap]
        [--models lab,unbalanced,fine,biased,upcycled] [--name methods] [--workers 2]

Each method of the registry is fitted to the same windows of pydocs, to remove 25 and
40 % of the routed experts' parameters. The smaller model is materialised and measured
on held-out windows of pydocs and WikiText-2: its loss, what that adds to the dense
model's, with the standard error over windows, and for what share of the tokens its most
probable next token is the dense model's.

At 40 % the CPU seconds of one thread and the increase of resident memory that fitting
takes are measured as well. That one fit shares nothing with other methods, so that each
is charged with all that it measures; the others share what they measure.

Methods that draw numbers are measured with several seeds, of which one is timed. A
method that refuses a model or ratio has a row with the reason. Rows are written when a
method on a model is finished, so that a stopped run resumes where it was.
"""

import argparse
import dataclasses
import functools
import itertools
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cost import highest_memory
from benchmarks.latency import timed
from benchmarks.machine import Rows
from benchmarks.quality import CORPORA, model_folder
from heapr_lab import methods
from heapr_lab.errors import HeaprLabError
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.methods.collectors import Measurements
from heapr_lab.methods.compression import Compression
from heapr_lab.models.likelihood import final_states, iter_log_probs
from heapr_lab.models.modes import evaluating
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.text.corpora import available_corpora
from heapr_lab.workbench.settings import PROFILES
from heapr_lab.workbench.workbench import Workbench, open_workbench

logger = logging.getLogger("methods")

Row = dict[str, Any]

RATIOS = (0.25, 0.4)
COST_RATIO = 0.4
"""The ratio at which fitting is timed."""
CORPUS = CORPORA[0]
"""The corpus that methods are fitted to."""
DRAWN = ("random", "random-groups", "sub-moe-like", "evoesap", "moe-i2-like")
"""Methods whose results depend on their seed."""
DRAWS = dict.fromkeys(DRAWN, 3)
"""How often such a method is measured; others once."""
N_WINDOWS, AT_ONCE, SEED = 48, 8, 0
PROFILE = PROFILES["lab"]
DETAILS = {
    "n_windows": N_WINDOWS,
    "n_test": PROFILE.n_test,
    "cost_ratio": COST_RATIO,
    "n_threads": 1,
}


# --- what to measure ------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What one process measures: a method on a model."""

    model: str
    method: str
    ratios: tuple[float, ...] = RATIOS
    draw: int = 0
    """The seed of the method."""

    def __str__(self) -> str:
        return f"{self.method}, {self.model} model, draw {self.draw}"


def missing(task: Task, rows: Rows) -> Task | None:
    """The task with the ratios that have no rows yet; None if all have."""
    left = tuple(r for r in task.ratios if not rows.has(labels(task, r)))
    return dataclasses.replace(task, ratios=left) if left else None


def labels(task: Task, ratio: float) -> Row:
    """The columns that say what a row is of."""
    return {
        "model": f"{task.model} model",
        "seed": SEED,
        "variant": task.method,
        "draw": task.draw,
        "ratio": ratio,
    }


# --- one model ------------------------------------------------------------------------


class Case:
    """A model and windows: what all methods share, and what they are compared with."""

    def __init__(self, model: str) -> None:
        """Draw the windows; nothing is run yet."""
        self.name, self.bench = model, opened(model)
        self.windows = self.bench.calibration_set(
            Calibration(CORPUS, n_sequences=N_WINDOWS, seed=SEED)
        )
        self.shared = Measurements(self.bench.model, self.windows)

    @property
    def model(self) -> Any:
        """The dense model."""
        return self.bench.model

    def fitted(self, task: Task, ratio: float, *, alone: bool) -> Compression:
        """What a method finds, from measurements of its own or from shared ones."""
        return methods.get(task.method).fit(
            self.model,
            self.windows,
            ratio=ratio,
            seed=task.draw,
            shared=None if alone else self.shared,
        )


@functools.lru_cache(maxsize=1)
def opened(name: str) -> Workbench:
    """The workbench of a model."""
    return open_workbench(
        model_folder(name), device="cpu", dtype="float32", profile=PROFILE.name
    )


@functools.lru_cache(maxsize=1)
def case_of(model: str) -> Case:
    """What the methods of neighbouring tasks share."""
    return Case(model)


@functools.lru_cache(maxsize=1)
def dense_predictions(name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The predictions of the dense model on each corpus that is there."""
    bench = opened(name)
    there, _ = available_corpora(CORPORA)
    return {
        corpus: predictions(bench.model, bench.test_windows(corpus).ids)
        for corpus in there
    }


# --- what is measured of a smaller model ----------------------------------------------


@torch.no_grad()
def predictions(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the most probable token at each position, both (windows, L - 1)."""
    losses, tops = [], []
    with evaluating(model):
        for batch in ids.split(AT_ONCE):
            states = final_states(model, batch)[:, :-1]
            log_p = torch.cat(list(iter_log_probs(model, states)))
            targets = batch[:, 1:].reshape(-1, 1)
            losses.append(-log_p.gather(1, targets).view(len(batch), -1))
            tops.append(log_p.argmax(1).view(len(batch), -1))
    return torch.cat(losses), torch.cat(tops)


def quality(model: Any, bench: Workbench, dense: Mapping[str, Any]) -> Row:
    """Losses, and agreement with the dense model, by corpus."""
    row: Row = {}
    for corpus, (before, dense_tops) in dense.items():
        losses, tops = predictions(model, bench.test_windows(corpus).ids)
        row[f"nll {corpus}"] = float(losses.mean())
        windows = (each.double().mean(1).tolist() for each in (losses, before))
        rise, stderr = paired_difference(*windows)
        row |= {f"delta_nll {corpus}": rise, f"stderr {corpus}": stderr}
        row[f"agreement {corpus}"] = float((tops == dense_tops).double().mean())
    return row


def sizes(smaller: Compression, dense: Any) -> Row:
    """Sizes of the smaller model, and the shares that are saved."""
    savings = smaller.savings(dense)
    row: Row = {"achieved_ratio": smaller.achieved_ratio}
    for name in ("parameters", "bytes", "routed_flops"):
        before, after = getattr(savings, name)
        row |= {name: after, f"{name}_saved": 1 - after / before}
    return row


def measured(make: Callable[[], Any]) -> tuple[Any, Row]:
    """What `make` returns, and what that took."""
    with highest_memory("cpu") as peak:
        output, seconds = timed(make)
    return output, {"fit_seconds": seconds, "fit_peak_bytes": peak[0]}


# --- the rows of a task ---------------------------------------------------------------


def measure(task: Task) -> list[Row]:
    """The rows of one task, in a process of one thread."""
    torch.set_num_threads(1)
    dense_predictions(task.model)  # which also warms up
    case = case_of(task.model)
    return [row_at(case, task, ratio) for ratio in task.ratios]


def row_at(case: Case, task: Task, ratio: float) -> Row:
    """The row of one ratio: all that is measured, or why the method refused."""
    alone = ratio == COST_RATIO and not task.draw
    make = functools.partial(case.fitted, task, ratio, alone=alone)
    row = labels(task, ratio) | {"kind": methods.get(task.method).compresses}
    try:
        fitted, cost = measured(make) if alone else (make(), {})
        small = fitted.materialise(case.model)
        row |= {"refused": ""} | sizes(fitted, case.model) | cost
    except HeaprLabError as error:
        return row | {"refused": str(error)}
    return row | quality(small, case.bench, dense_predictions(case.name))


def main() -> None:
    """Measure what has no rows yet, one model after the other."""
    parser = argparse.ArgumentParser(description="Measure all compression methods.")
    parser.add_argument("--models", default="lab,unbalanced,fine,biased,upcycled")
    parser.add_argument("--methods", default="", help="by default all")
    parser.add_argument("--name", default="methods", help="of the files written")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    models, rows = options.models.split(","), Rows(options.name)
    names = options.methods.split(",") if options.methods else list(methods.names())
    planned = [
        Task(model, name, draw=draw)
        for model, name in itertools.product(models, names)
        for draw in range(DRAWS.get(name, 1))
    ]
    left = [rest for task in planned if (rest := missing(task, rows))]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
        run(left, rows, pool)


def run(left: Sequence[Task], rows: Rows, pool: Executor) -> None:
    """Measure the tasks, and write the rows of each when it is finished.

    One that fails has no rows, so that the next run tries it again.
    """
    began = time.monotonic()
    futures = {pool.submit(measure, task): task for task in left}
    for done, future in enumerate(as_completed(futures), start=1):
        minutes = (time.monotonic() - began) / 60
        logger.info(
            "%d of %d: %s; %.1f minutes, about %.1f to go",
            done,
            len(left),
            futures[future],
            minutes,
            minutes / done * (len(left) - done),
        )
        if future.exception() is None:
            rows.add(future.result(), DETAILS)
        else:
            logger.error("it failed", exc_info=future.exception())


if __name__ == "__main__":
    main()
