"""What an evaluation measures of one model, and its progress. No torch until then."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.progress import Parts, Progress, StartPart
from heapr_lab.storage.hashing import digest

if TYPE_CHECKING:
    from heapr_lab.recipes.making import PruningResult
    from heapr_lab.text.calibration import CalibrationSet
    from heapr_lab.workbench.settings import Profile
    from heapr_lab.workbench.workbench import Workbench

_WITH_GRADIENTS = 3
"""Forward passes that one with gradients takes as long as."""


@dataclass(frozen=True)
class Part:
    """One corpus or task of an evaluation."""

    bench: "Workbench"
    dataset: str
    windows: "CalibrationSet | None"
    """The windows of the corpus; None for a task."""
    n_windows: int
    """Its size, for the time that is left."""

    @property
    def text(self) -> str:
        """Hash of the windows, or of what determines the items of the task."""
        if self.windows is not None:
            return self.windows.fingerprint
        n_items = self.bench.profile.items_of(self.dataset)
        return digest(self.bench.task_key(self.dataset, n_items))

    def measured(
        self, made: "PruningResult | None", progress: Progress
    ) -> dict[str, Any]:
        """Columns of `PruningSession.points` for a pruned model, or the dense one."""
        keep = None if made is None else made.keep
        down_projs = None if made is None else made.down_projs
        if self.windows is None:
            score = self.bench.task_accuracy(
                keep, self.dataset, down_projs=down_projs, progress=progress
            )
            right = tuple(score.get("items", ()))
            facts = {"accuracy": score["value"], "stderr": score["stderr"]}
            return facts | {"items": right, "text": self.text}
        loss = self.bench.perplexity(
            keep, self.windows, down_projs=down_projs, progress=progress
        )
        return {
            "nll": loss.nll,
            "perplexity": loss.value,
            "n_tokens": loss.n_tokens,
            "windows": loss.windows,
            "text": self.text,
        }


def seconds_of_scoring(table: ImportanceTable, profile: "Profile") -> float | None:
    """Seconds a test window takes, by the pass that measured a table, if it says."""
    origin = table.metadata.get("provenance") or {}
    drawn, seconds = origin.get("calibration") or {}, origin.get("seconds")
    n_windows = drawn.get("n_sequences", 0) - origin.get("resumed_at", 0)
    if not seconds or n_windows < 1 or "seq_len" not in drawn:
        return None
    longer = profile.seq_len / drawn["seq_len"]
    return float(seconds / n_windows * longer / _WITH_GRADIENTS)


class Clock:
    """Turns the progress of the parts into that of the whole, and takes their time."""

    def __init__(self, total: int, report: Callable[..., None] | None) -> None:
        self._report = report
        self._label, self._began, self._works = "", 0.0, False
        self._parts = Parts(total, self._measured)

    def part(self, label: str, n_windows: int) -> Progress:
        """Begin the next part, which counts as so many windows.

        The one before has ended, whether it was measured or read from the cache.
        """
        self._label, self._began, self._works = label, time.monotonic(), False
        progress = self._parts.part(n_windows)
        self._tell(cached=True)
        return progress

    @property
    def seconds(self) -> float:
        """What the part has taken so far; 0 if it was read from the cache."""
        return time.monotonic() - self._began if self._works else 0.0

    def making(self, n_windows: int) -> StartPart:
        """Begin the part in which weights are made."""
        reached = self.part("weights", n_windows)

        def start(label: str, unit: str) -> Progress:
            def report(done: int, total: int) -> None:
                self._label = f"{label}: {unit} {done} of {total}; in all"
                reached(done, total)

            return report

        return start

    def _measured(self, _done: int, _total: int) -> None:
        self._works = True
        self._tell(cached=False)

    def _tell(self, *, cached: bool) -> None:
        if self._report is not None:
            done, total = self._parts.done, self._parts.total
            self._report(done, total, f"{self._label}: window", cached=cached)
