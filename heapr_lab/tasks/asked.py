"""A task by the name it is asked for by: its items, their identity, and its results."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import nn

from heapr_lab.progress import Progress
from heapr_lab.tasks.harness import continuation_task, items_fingerprint, run_tasks
from heapr_lab.tasks.items import task_items
from heapr_lab.tasks.paper_tasks import PAPER_TASKS
from heapr_lab.tasks.summary import task_summary
from heapr_lab.text.calibration_spec import DEFAULT_CORPUS
from heapr_lab.text.corpora import load_corpus
from heapr_lab.workbench.settings import CONTINUATION

_COLUMNS = ["metric", "value", "stderr", "n"]
_DRAW = {"seed": 0}
"""How items of the paper's tasks are drawn."""


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
        corpus, task = self._corpus, {"task": self.name}
        if self.name in PAPER_TASKS:
            return items_fingerprint(self.name) | {"n_items": self.limit} | task | _DRAW
        if corpus is None:
            fingerprint = items_fingerprint(self.name, limit=self.limit)
            return fingerprint | {"n_items": self.limit} | task
        text = load_corpus(corpus, split="test")
        return {"corpus": text.fingerprint, "n_items": self._n_items} | task

    def run(
        self, model: nn.Module, tokenizer: Any, progress: Progress, *, stored: bool
    ) -> list[dict[str, Any]]:
        """Every metric of a model: rows of metric, value, stderr, n (items).

        Those of the paper's tasks also have `items`, the metric of each item in the
        order of the draw. They come from the cache, and are kept there, if `stored`.
        """
        corpus, task = self._corpus, self.name
        if task in PAPER_TASKS:
            options: dict[str, Any] = {"stored": stored, "progress": progress} | _DRAW
            items = task_items(model, tokenizer, [task], n_items=self.limit, **options)
            there = [m for m in ("acc", "acc_norm") if items[m].notna().all()]
            return [_row(items, metric) for metric in there]
        if corpus is not None:
            text = load_corpus(corpus, split="test")
            task = continuation_task(text, n_items=self._n_items)
        frame = run_tasks(model, tokenizer, [task], limit=self.limit, progress=progress)
        rows: list[dict[str, Any]] = frame[_COLUMNS].to_dict("records")
        return rows

    @property
    def _corpus(self) -> str | None:
        """The corpus of continuations; None for the tasks of the harness."""
        name, _, corpus = self.name.partition(":")
        return (corpus or DEFAULT_CORPUS) if name == CONTINUATION else None

    @property
    def _n_items(self) -> int:
        return self.limit or self.n_continuations


def _row(items: pd.DataFrame, metric: str) -> dict[str, Any]:
    """The row of a metric, of a frame of `task_items` of one task."""
    summary = task_summary(items, metric=metric).iloc[0]
    row: dict[str, Any] = summary[_COLUMNS].to_dict()
    return row | {"items": items[metric].tolist()}
