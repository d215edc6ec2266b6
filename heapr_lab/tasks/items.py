"""Zero-shot accuracy item by item: the same items for every state of a model.

Two states are compared on the items that both answered, whose accuracies differ far
less between states than between samples of items; `task_summary` has the tables.

The harness's stock definitions ask and judge; the items are drawn by seed, so that
the first 100 of 400 are those of a draw of 100.

A state is the model with its weights and dtype, and with the mask and the replaced
W_down that are active around the call. What was measured in a state, in this process or
another, is read from the cache: all rows of a key are in one file, which is written
again whenever some are added, so that an interrupted measurement goes on where it was.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import nn

from heapr_lab.errors import SpecError, whole_number
from heapr_lab.models.backend import backend_of
from heapr_lab.models.identity import check_unchanged, identity_in_force, weights_state
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import Parts, Progress, no_report
from heapr_lab.storage.cache import cache_path, check_same_key, lock
from heapr_lab.storage.files import read_frame, write_frame
from heapr_lab.storage.paths import writable
from heapr_lab.tasks.harness import (
    continuation_task,
    items_fingerprint,
    load_tasks,
    quiet,
    run_tasks,
)
from heapr_lab.tasks.paper_tasks import (
    METRICS,
    PAPER_TASKS,
    continued_corpus,
    task_summary,
)
from heapr_lab.text.calibration import tokenizer_fingerprint
from heapr_lab.text.corpora import load_corpus

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

_SCHEMA = 1
"""Increased whenever rows change for the same input."""
_ITEMS_AT_ONCE = 100
"""Items that an interrupt loses at most."""
_COLUMNS = ["metric", "value", "stderr", "n"]
_DRAW = {"seed": 0}
"""How items of the paper's tasks are drawn where a task is asked for by name."""

Compute = Callable[[list[int]], pd.DataFrame]
"""Makes the rows of these numbers."""


def task_items(
    model: nn.Module,
    tokenizer: Any,
    tasks: "Sequence[str | ConfigurableTask]" = tuple(PAPER_TASKS),
    *,
    n_items: int | None = 400,
    seed: int = 0,
    stored: bool = True,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """How `model` answers each of some items of each task, one row for each.

    Columns: task; item, its number in the task; acc and acc_norm, 1 if the harness
    counts it as right by that metric and 0 if not (NaN if the task has no acc_norm).

    Items that were answered in this state of the model, by weights, dtype and the masks
    that are active around the call, come from the cache.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer; it is not changed.
        tasks: names (`PAPER_TASKS`, or any multiple-choice task that the harness knows)
            or tasks.
        n_items: items of each task, or all that it has if there are fewer; None for
            all.
        seed: draws the items, whatever the model.
        stored: False asks all items, and keeps no answer, as for a model that computes
            something else than its weights and masks say.
        progress: called with (items done, items in all), also while items are asked.

    Raises:
        CorpusError: the items of a task are not available here.
        SpecError: no task is given, a task is unknown or not judged by accuracy, or
            `n_items` is not positive.
    """
    if n_items is not None:
        whole_number(n_items, name="n_items")
    if not tasks:
        raise SpecError(f"no tasks given; for example {', '.join(PAPER_TASKS)}")
    with quiet(), evaluating(model):
        from heapr_lab.tasks.harness_model import PackingHFLM

        lm = PackingHFLM(model, tokenizer)
        state = State(model) if stored else None
        read = {"tokenizer": tokenizer_fingerprint(tokenizer)}
        asked = [
            _Asked(name, member, read | items_fingerprint(task), n_items, seed)
            for task in tasks
            for name, member in load_tasks([task])["tasks"].items()
        ]
        parts = Parts(sum(len(task.drawn) for task in asked), progress)
        return pd.concat(
            [task.rows(lm, state, parts) for task in asked], ignore_index=True
        )


def drawn_items(
    n_available: int, n_items: int | None = None, *, seed: int
) -> list[int]:
    """Numbers of the drawn items, in the order of the draw, which is nested.

    Example:
        >>> drawn_items(9, 3, seed=0), drawn_items(9, 4, seed=0)
        ([6, 4, 2], [6, 4, 2, 1])
    """

    def place(item: int) -> str:
        return hashlib.sha256(f"{seed} {item}".encode()).hexdigest()

    return sorted(range(n_available), key=place)[:n_items]


class _Asked:
    """A task and the items of it that are asked."""

    def __init__(
        self, name: str, task: Any, key: dict[str, str], n_items: int | None, seed: int
    ) -> None:
        self.name, self.task, self.key = name, task, key | {"task": name}
        self.drawn = drawn_items(len(task.eval_docs), n_items, seed=seed)

    def rows(self, lm: Any, state: "State | None", parts: Parts) -> pd.DataFrame:
        """The rows of the items drawn, from the cache of a state where they are there.

        They are the next of the `parts`, which also goes on while the model answers.
        """
        progress, n_all = parts.part(len(self.drawn)), len(self.drawn)
        start = parts.done

        def answered(items: list[int]) -> pd.DataFrame:
            begun, n = parts.done - start, len(items)
            lm.progress = lambda done, of: progress(begun + n * done // of, n_all)
            return self._answered(lm, items)

        if state is None:
            rows = answered(self.drawn).loc[self.drawn]
        else:
            rows = cached_rows(
                "task_items",
                state.key(self.key),
                self.drawn,
                state.checked(answered),
                at_once=state.at_once(_ITEMS_AT_ONCE),
                progress=progress,
            )
        # Files of earlier versions have a column more.
        named = rows[[*METRICS]].rename_axis("item").reset_index()
        named.insert(0, "task", self.name)
        return named

    def _answered(self, lm: Any, items: list[int]) -> pd.DataFrame:
        import lm_eval

        numbers = sorted(items)  # the harness numbers its answers in this order
        output = lm_eval.evaluate(
            lm=lm,
            task_dict={"tasks": {self.name: self.task}, "groups": {}, "group_map": {}},
            samples={self.name: numbers},
            bootstrap_iters=0,
            log_samples=True,
        )
        assert output is not None  # only the other ranks of a parallel run get None
        samples = output["samples"][self.name]
        return pd.DataFrame(
            [self._row(sample) for sample in samples],
            index=[sample["doc_id"] for sample in samples],
        )

    def _row(self, sample: dict[str, Any]) -> dict[str, float]:
        """What the harness says of one item.

        Raises:
            SpecError: it is not judged by accuracy.
        """
        if "acc" not in sample:
            raise SpecError(
                f"task {self.name!r} is not judged by the accuracy of choices, but by "
                f"{', '.join(sample['metrics'])}; run it with run_tasks"
            )
        return {
            "acc": float(sample["acc"]),
            "acc_norm": float(sample.get("acc_norm", math.nan)),
        }


# --- rows that are kept for each state -------------------------------------------


class State:
    """The present state of a model, in which rows are computed once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.identity = identity_in_force(model)
        self._weights = weights_state(model)

    def key(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The key of rows that the model computes in this state."""
        return {"schema": _SCHEMA, "model": self.identity, **fields}

    def checked(self, compute: Compute) -> Compute:
        """`compute`, after which the weights must be those of this state."""

        def of_one_model(missing: list[int]) -> pd.DataFrame:
            frame = compute(missing)
            check_unchanged(self.model, self._weights)
            return frame

        return of_one_model

    def at_once(self, n: int) -> int:
        """Rows to compute before a file is written: n, or more for layers on disk."""
        return backend_of(self.model).at_once(self.model, n)


def cached_rows(
    kind: str,
    key: Mapping[str, Any],
    numbers: Sequence[int],
    compute: Compute,
    *,
    at_once: int,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """The rows with these `numbers`, in their order; those that are missing are made.

    While one thread or process computes rows of a key, others that ask for it wait.

    Args:
        kind: the folder in the cache, such as `task_items`.
        key: every field that determines the rows, as plain data.
        numbers: the numbers of the rows, which are the index of the frame.
        compute: the rows with given numbers, which are their index, in any order.
        at_once: rows computed before the file is written; an interrupt loses so many.
        progress: called with (rows done, rows in all).

    Raises:
        CacheError: the file was made for another key.
    """
    path = cache_path(kind, key, extension="parquet")
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    report = progress or no_report
    with lock(path):
        rows = pd.DataFrame()
        if path.exists():
            rows, stored = read_frame(path)
            check_same_key(path, stored, key)
        there = set(rows.index)
        missing = [number for number in numbers if number not in there]
        done = len(numbers) - len(missing)
        report(done, len(numbers))
        for start in range(0, len(missing), at_once):
            batch = compute(missing[start : start + at_once])
            rows = batch if rows.empty else pd.concat([rows, batch])
            write_frame(path, rows, dict(key))
            report(min(done + start + at_once, len(numbers)), len(numbers))
    return rows.loc[list(numbers)]


# --- by name ----------------------------------------------------------------------


@dataclass(frozen=True)
class AskedTask:
    """A task of the harness, or `continuation`: four-way items of a corpus.

    The corpus is named after a colon; without one it is pydocs.
    """

    name: str
    limit: int | None
    """Items: of the paper's tasks drawn ones, of others the first. None takes all, or
    the profile's number of continuations."""
    n_continuations: int
    """The profile's number of continuations."""

    def key(self) -> dict[str, Any]:
        """What determines its items, in cache keys."""
        asked = {"n_items": self.limit, "task": self.name}
        if self.name in PAPER_TASKS:
            return items_fingerprint(self.name) | asked | _DRAW
        corpus = continued_corpus(self.name)
        if corpus is None:
            return items_fingerprint(self.name, limit=self.limit) | asked
        text = load_corpus(corpus, split="test")
        return asked | {"corpus": text.fingerprint, "n_items": self._n_items}

    def run(
        self, model: nn.Module, tokenizer: Any, progress: Progress, *, stored: bool
    ) -> list[dict[str, Any]]:
        """Every metric of a model: rows of metric, value, stderr, n (items).

        Those of the paper's tasks also have `items`, the metric of each item in the
        order of the draw. They come from the cache, and are kept there, if `stored`.
        """
        corpus, task = continued_corpus(self.name), self.name
        if task in PAPER_TASKS:
            options: dict[str, Any] = {"stored": stored, "progress": progress} | _DRAW
            items = task_items(model, tokenizer, [task], n_items=self.limit, **options)
            there = [m for m in METRICS if items[m].notna().all()]
            return [_row_of(items, metric) for metric in there]
        if corpus is not None:
            text = load_corpus(corpus, split="test")
            task = continuation_task(text, n_items=self._n_items)
        frame = run_tasks(model, tokenizer, [task], limit=self.limit, progress=progress)
        rows: list[dict[str, Any]] = frame[_COLUMNS].to_dict("records")
        return rows

    @property
    def _n_items(self) -> int:
        return self.limit or self.n_continuations


def _row_of(items: pd.DataFrame, metric: str) -> dict[str, Any]:
    """The row of a metric, of a frame of `task_items` of one task."""
    summary = task_summary(items, metric=metric).iloc[0]
    row: dict[str, Any] = summary[_COLUMNS].to_dict()
    return row | {"items": items[metric].tolist()}
