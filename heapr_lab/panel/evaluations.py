"""What an evaluation measures of one model, and its progress. No torch until then."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heapr_lab.progress import Parts, Progress, StartPart, TimeLeft, time_left_text
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.storage.hashing import digest

if TYPE_CHECKING:
    from heapr_lab.recipes.making import PruningResult
    from heapr_lab.text.calibration import CalibrationSet
    from heapr_lab.workbench.workbench import Workbench

TASK_WINDOWS = 32
"""Windows that a task counts as until it was measured, for the time left."""


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

    def measured(self, made: "PruningResult | None", clock: "Clock") -> dict[str, Any]:
        """Columns of `PruningSession.points` for a pruned model, or the dense one."""
        keep, down_projs = edit_of(made)
        if self.windows is None:
            progress = clock.share_of(self.n_windows)
            score = self.bench.task_accuracy(
                keep, self.dataset, down_projs=down_projs, progress=progress
            )
            right = tuple(score.get("items", ()))
            facts = {"accuracy": score["value"], "stderr": score["stderr"]}
            return facts | {"items": right, "text": self.text}
        loss = self.bench.perplexity(
            keep, self.windows, down_projs=down_projs, progress=clock.parts
        )
        return {
            "nll": loss.nll,
            "perplexity": loss.value,
            "n_tokens": loss.n_tokens,
            "windows": loss.windows,
            "text": self.text,
        }


def measured_of(
    parts: Sequence[Part],
    made: "PruningResult | None",
    clock: "Clock",
    *,
    named: str = "dense",
) -> Iterator[dict[str, Any]]:
    """The measurements of one model, a row for each corpus and task."""
    for part in parts:
        clock.begin(f"{named} on {part.dataset}")
        measured = part.measured(made, clock)
        yield {"dataset": part.dataset, "seconds": clock.seconds, **measured}
        clock.end(part.n_windows)


def edit_of(made: "PruningResult | None") -> tuple[KeepMask | None, Any]:
    """The mask and the new W_down; None where the model is dense, or only masked."""
    if made is None:
        return None, None
    compensation = made.compensation
    return made.keep, None if compensation is None else compensation.down_projs


class Clock:
    """Turns the progress of the parts into that of the whole, with the time left."""

    def __init__(self, total: int, report: Callable[..., None] | None) -> None:
        self._report = report
        self._label, self._began, self._works = "", 0.0, False
        self._left = TimeLeft()
        self.parts = Parts(total, self._measured)

    def begin(self, label: str) -> None:
        """Begin a part."""
        self._label, self._began, self._works = label, time.monotonic(), False
        self._left.skip_to(self.parts.done)
        self._tell()

    @property
    def seconds(self) -> float:
        """What the part has taken so far; 0 if it was read from the cache."""
        return time.monotonic() - self._began if self._works else 0.0

    def share_of(self, n_windows: int) -> Progress:
        """Progress of work that counts as `n_windows`.

        What begins again does not take the bar back.
        """
        furthest = 0

        def report(done: int, total: int) -> None:
            nonlocal furthest
            furthest = max(furthest, n_windows * done // max(1, total))
            self.parts(furthest, n_windows)

        return report

    def making(self, n_windows: int) -> StartPart:
        """Progress of weights whose making counts as `n_windows`."""
        reached = self.share_of(n_windows)

        def start(label: str, unit: str) -> Progress:
            def report(done: int, total: int) -> None:
                self._label = f"{label}: {unit} {done} of {total}; in all"
                reached(done, total)

            return report

        return start

    def end(self, n_windows: int) -> None:
        """End a part, whether it was measured or read from the cache."""
        self.parts.end(n_windows)
        self._left.skip_to(self.parts.done)
        self._tell()

    def _measured(self, done: int, _total: int) -> None:
        self._works = True
        self._left.reached(done)
        self._tell()

    def _tell(self) -> None:
        if self._report is not None:
            done, total = self.parts.done, self.parts.total
            left = time_left_text(self._left.seconds(total))
            self._report(done, total, f"{self._label}: window", left=left)
