"""Every compression method on the same models, text and ratios.

    OMP_NUM_THREADS=1 python benchmarks/methods.py [--models lab,unbalanced,fine]
        [--seeds 0,1,2] [--methods heapr,reap] [--name methods] [--workers 2]

Each method of the registry is fitted to the same windows of pydocs, drawn by the seed,
to remove 20, 25, 40 and 50 % of the routed experts' parameters. The smaller model is
materialised and measured on held-out windows of every corpus that is there: its loss,
what that adds to the dense model's, and for what share of the tokens its most probable
next token is the dense model's. A method that removes atoms and leaves W_down as it is
is measured once more with W_down compensated on the same windows ("+ compensation").

With the first seed these are measured as well: accuracy on the continuation task of
pydocs; tokens per CPU second of a prefill, both models taking turns; and, at 40 %, the
CPU seconds of one thread and the increase of resident memory that fitting takes. That
one fit shares nothing with other methods, so that each is charged with all that it
measures; the others share what they measure. A method whose fits then take more than
`--most-seconds` on average over the models is not measured with the other seeds.

All of it takes about 87 minutes on 2 cores: a model 14.5 minutes with the first seed
and 7.2 with another one, measured with the lab model, which has a third of all fits.

A method that refuses a model or ratio has a row with the reason. Rows are written when
a method on a model is finished, so that a stopped run resumes where it was.
"""

import argparse
import dataclasses
import functools
import itertools
import logging
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cost import highest_memory
from benchmarks.latency import in_turns, seconds_of
from benchmarks.machine import Rows
from benchmarks.quality import model_folder
from heapr_lab import methods
from heapr_lab.errors import HeaprLabError
from heapr_lab.methods.collectors import Measurements
from heapr_lab.methods.compression import AtomCompression, Compression
from heapr_lab.models.likelihood import final_states, iter_log_probs
from heapr_lab.models.modes import evaluating
from heapr_lab.refinement.compensation import compensation_of, fit_compensation
from heapr_lab.tasks.harness import continuation_task, run_tasks
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.text.corpora import available_corpora, load_corpus
from heapr_lab.workbench.workbench import Workbench, open_workbench

logger = logging.getLogger("methods")

Row = dict[str, Any]

RATIOS = (0.2, 0.25, 0.4, 0.5)
COST_RATIO = 0.4
"""The ratio at which fitting is timed."""
CORPORA = ("pydocs", "wikitext2", "ptb", "c4")
CORPUS = CORPORA[0]
"""The corpus that methods are fitted to."""
N_WINDOWS, N_TEST, N_ITEMS = 48, 12, 60
N_PROMPTS, N_ROUNDS, AT_ONCE = 4, 3, 8
MOST_SECONDS = 120.0
COMPENSATED = " + compensation"
CHOOSES_WEIGHTS = "compress"
"""The method that compensates where that is better, and else leaves W_down as it is."""
DETAILS = {
    "n_windows": N_WINDOWS,
    "n_test": N_TEST,
    "n_items": N_ITEMS,
    "n_prompts": N_PROMPTS,
    "n_rounds": N_ROUNDS,
    "cost_ratio": COST_RATIO,
    "n_threads": 1,
}


# --- what to measure ------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What one process measures: a method on a model, with one draw of windows."""

    model: str
    seed: int
    method: str
    ratios: tuple[float, ...] = RATIOS
    costly: bool = False
    """Whether accuracy, speed and the cost of fitting are measured."""

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.method}, {self.model} model"


def tasks(
    models: Sequence[str], seed: int, names: Sequence[str], *, costly: bool
) -> Iterator[Task]:
    """All tasks of one seed; those that share measurements are neighbours."""
    for model, name in itertools.product(models, names):
        yield Task(model, seed, name, costly=costly)


def missing(task: Task, rows: Rows) -> Task | None:
    """The task with the ratios that have no rows yet; None if all have."""
    left = tuple(r for r in task.ratios if not rows.has(labels(task, r, task.method)))
    return dataclasses.replace(task, ratios=left) if left else None


def labels(task: Task, ratio: float, variant: str) -> Row:
    """The columns that say what a row is of."""
    return {
        "model": f"{task.model} model",
        "seed": task.seed,
        "variant": variant,
        "ratio": ratio,
    }


def affordable(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]], most_seconds: float
) -> list[str]:
    """The methods whose timed fits take no more than that, the mean over models."""
    cheap = []
    for name in names:
        fits = [row.get("fit_seconds") for row in rows if row["variant"] == name]
        seconds = [value for value in fits if value is not None and value == value]
        if not seconds or statistics.mean(seconds) <= most_seconds:
            cheap.append(name)
    return cheap


# --- one model and one draw of windows ------------------------------------------------


class Case:
    """A model and windows: what all methods share, and what they are compared with."""

    def __init__(self, model: str, seed: int) -> None:
        """Draw the windows; nothing is run yet."""
        self.name, self.seed, self.bench = model, seed, opened(model)
        self.windows = self.bench.calibration_set(
            Calibration(CORPUS, n_sequences=N_WINDOWS, seed=seed)
        )
        self.shared = Measurements(self.bench.model, self.windows)

    @property
    def model(self) -> Any:
        """The dense model."""
        return self.bench.model

    def fitted(self, name: str, ratio: float, *, alone: bool) -> Compression:
        """What a method finds, from measurements of its own or from shared ones."""
        return methods.get(name).fit(
            self.model,
            self.windows,
            ratio=ratio,
            seed=self.seed,
            shared=None if alone else self.shared,
        )

    def compensated(self, pruned: AtomCompression, *, alone: bool) -> AtomCompression:
        """The same atoms, with W_down solved anew on the windows."""
        if alone:
            compensation = fit_compensation(self.model, pruned.keep, self.windows)
        else:
            sums = self.shared.calibrated
            compensation = compensation_of(sums.solvers(sums.span), pruned.keep)
        return dataclasses.replace(pruned, down_projs=compensation.down_projs)


@functools.lru_cache(maxsize=1)
def opened(name: str) -> Workbench:
    """The workbench of a model."""
    bench = open_workbench(
        model_folder(name), device="cpu", dtype="float32", profile="lab"
    )
    bench.profile = dataclasses.replace(bench.profile, n_test=N_TEST)
    return bench


@functools.lru_cache(maxsize=1)
def case_of(model: str, seed: int) -> Case:
    """What the methods of neighbouring tasks share."""
    return Case(model, seed)


@functools.lru_cache(maxsize=1)
def dense_predictions(name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The predictions of the dense model on each corpus that is there."""
    bench = opened(name)
    there, _ = available_corpora(CORPORA)
    return {
        corpus: predictions(bench.model, bench.test_windows(corpus).ids)
        for corpus in there
    }


@functools.lru_cache(maxsize=1)
def dense_accuracy(name: str) -> float:
    """The accuracy of the dense model."""
    return float(accuracy(opened(name).model, opened(name))["accuracy"])


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
        row[f"delta_nll {corpus}"] = float((losses - before).mean())
        row[f"agreement {corpus}"] = float((tops == dense_tops).double().mean())
    return row


@functools.lru_cache(maxsize=1)
def items() -> Any:
    """The continuation task of the corpus that methods are fitted to."""
    return continuation_task(load_corpus(CORPUS, split="test"), n_items=N_ITEMS)


def accuracy(model: Any, bench: Workbench) -> Row:
    """Accuracy on the continuation task, and its standard error."""
    frame = run_tasks(model, bench.tokenizer, [items()])
    row = frame[frame["metric"].eq("acc")].iloc[0]
    return {"accuracy": float(row["value"]), "accuracy_stderr": float(row["stderr"])}


def speed(model: Any, dense: Any, ids: torch.Tensor) -> Row:
    """Tokens per CPU second of a prefill: medians of turns with the dense model."""
    prompt = ids[:N_PROMPTS]
    calls = [functools.partial(seconds_of, each, prompt) for each in (model, dense)]
    runs = [functools.partial(cpu_seconds, call) for call in calls]
    rate, whole = (
        prompt.numel() / statistics.median(times)
        for times in in_turns(runs, n_rounds=N_ROUNDS)
    )
    return {"tokens_per_second": rate, "tokens_per_second_dense": whole}


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of one call, which do not count those of other processes."""
    began = time.process_time()
    call()
    return time.process_time() - began


def sizes(smaller: Compression, dense: Any) -> Row:
    """Sizes of the smaller model, and the shares that are saved."""
    savings = smaller.savings(dense)
    row: Row = {"achieved_ratio": smaller.achieved_ratio}
    for name in ("parameters", "bytes", "routed_flops"):
        before, after = getattr(savings, name)
        row |= {name: after, f"{name}_saved": 1 - after / before}
    return row


def timed(make: Callable[[], Any]) -> tuple[Any, Row]:
    """What `make` returns, and what that took."""
    with highest_memory("cpu") as peak:
        began = time.process_time()
        output = make()
        seconds = time.process_time() - began
    return output, {"fit_seconds": seconds, "fit_peak_bytes": peak[0]}


# --- the rows of a task ---------------------------------------------------------------


def measure(task: Task) -> list[Row]:
    """The rows of one task, in a process of one thread."""
    torch.set_num_threads(1)
    dense_predictions(task.model)  # which also warms up
    case = case_of(task.model, task.seed)
    return [row for ratio in task.ratios for row in rows_at(case, task, ratio)]


def rows_at(case: Case, task: Task, ratio: float) -> Iterator[Row]:
    """The rows of one ratio: of the method, and of it with compensation."""
    alone = task.costly and ratio == COST_RATIO
    fit = functools.partial(case.fitted, task.method, ratio, alone=alone)
    fitted, row = attempt(case, task, fit, alone=alone)
    kind = {"kind": methods.get(task.method).compresses}
    yield labels(task, ratio, task.method) | kind | row
    if not isinstance(fitted, AtomCompression) or fitted.down_projs is not None:
        return
    if task.method != CHOOSES_WEIGHTS:
        again = functools.partial(case.compensated, fitted, alone=alone)
        _, more = attempt(case, task, again, alone=alone)
        if "fit_seconds" in more:  # both one after the other
            more["fit_seconds"] += row["fit_seconds"]
            more["fit_peak_bytes"] = max(row["fit_peak_bytes"], more["fit_peak_bytes"])
        yield labels(task, ratio, task.method + COMPENSATED) | kind | more


def attempt(
    case: Case, task: Task, make: Callable[[], Compression], *, alone: bool
) -> tuple[Compression | None, Row]:
    """A compression and all that is measured of it, or why it was refused."""
    try:
        fitted, cost = timed(make) if alone else (make(), {})
        small = fitted.materialise(case.model)
        row = sizes(fitted, case.model)
    except HeaprLabError as error:
        return None, {"refused": str(error)}
    row |= quality(small, case.bench, dense_predictions(case.name))
    if task.costly:
        row |= accuracy(small, case.bench)
        row["accuracy_dense"] = dense_accuracy(case.name)
        row |= speed(small, case.model, case.windows.ids)
    return fitted, {"refused": ""} | row | cost


def main() -> None:
    """Measure what has no rows yet, one seed after the other."""
    parser = argparse.ArgumentParser(description="Measure all compression methods.")
    parser.add_argument("--models", default="lab,unbalanced,fine")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default="", help="by default all")
    parser.add_argument("--name", default="methods", help="of the files written")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--most-seconds", type=float, default=MOST_SECONDS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    models, rows = options.models.split(","), Rows(options.name)
    names = options.methods.split(",") if options.methods else list(methods.names())
    spawn = multiprocessing.get_context("spawn")
    for turn, seed in enumerate(map(int, options.seeds.split(","))):
        if turn:
            names = affordable(names, rows.rows, options.most_seconds)
        planned = tasks(models, seed, names, costly=not turn)
        left = [rest for task in planned if (rest := missing(task, rows))]
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
