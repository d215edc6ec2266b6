"""Progress of one task or of several, as a bar or as the time left."""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm.auto import tqdm

Progress = Callable[[int, int], None]
"""Called with (done, total) during the work; an exception it raises ends the work."""


StartPart = Callable[[str, str], Progress]
"""Begins a part of the work, by its label and unit, and gives what it reports to."""


def no_report(_done: int, _total: int) -> None:
    """A `Progress` that does nothing."""


def no_parts(_label: str, _unit: str) -> Progress:
    """A `StartPart` whose parts report nothing."""
    return no_report


def noted(progress: Progress, text: str) -> None:
    """Say beside a bar what the work is at; other kinds of progress do not show it."""
    if isinstance(progress, _Bar):
        progress.note(text)


class Parts:
    """Reports the progress of consecutive parts as progress of the whole."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        """Nothing has begun.

        Args:
            total: the sum of the sizes of all parts.
            progress: called with the progress of the whole.
        """
        self.total = total
        self.done = 0
        self._end = 0
        self._report = progress or no_report

    def part(self, size: int) -> Progress:
        """Begin the next part, and get what takes its progress.

        The part before has ended, even if it has reported less than its size. What
        counts in another unit is scaled to `size`, and what begins again, such as with
        smaller batches, does not go back.
        """
        self.done = start = self._end
        self._end += size

        def report(done: int, total: int) -> None:
            self.done = max(self.done, start + size * done // max(1, total))
            self._report(self.done, self.total)

        return report


class TimeLeft:
    """Estimates the time left from the mean time per unit of work so far.

    Units: seconds; work in any unit.

    Example:
        >>> now = iter([0.0, 6.0])
        >>> left = TimeLeft(clock=lambda: next(now))
        >>> left.reached(2)
        >>> left.seconds(10)
        24.0
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the work.

        Args:
            clock: returns the current time.
        """
        self._clock = clock
        self._seconds = self._measured = 0.0
        self.skip_to(0)

    def skip_to(self, done: float) -> None:
        """Count `done` as finished without work since the last call: it was cached."""
        self._done, self._last = done, self._clock()

    def reached(self, done: float) -> None:
        """Count `done` as finished by work; a smaller number begins another task."""
        if done < self._done:
            self._seconds = self._measured = self._done = 0.0
        now = self._clock()
        self._seconds += now - self._last
        self._measured += done - self._done
        self._done, self._last = done, now

    def seconds(self, total: float) -> float | None:
        """The time until `total` is done; None before anything was measured."""
        if not self._measured:
            return None
        return self._seconds / self._measured * (total - self._done)


def time_left_text(seconds: float | None) -> str:
    """The time left as text, such as `, about 1:05 left`; empty if it is unknown."""
    if not seconds:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f", about {minutes}:{rest:02d} left"


def duration(seconds: float) -> str:
    """A time as text.

    Example:
        >>> duration(30), duration(150), duration(90000)
        ('30 s', '2.5 min', '25 h')
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"


def silent() -> bool:
    """Whether `$HEAPR_LAB_PROGRESS` is 0."""
    return os.environ.get("HEAPR_LAB_PROGRESS", "1") == "0"


@contextlib.contextmanager
def progress_bar(
    label: str, unit: str, *, also: Progress | None = None
) -> Iterator[Progress]:
    """A bar of rate and time left, called with (done, total), removed at the end.

    It shows nothing if `$HEAPR_LAB_PROGRESS` is 0; `also` is called in any case.
    """
    with tqdm(
        desc=label, unit=unit, disable=silent(), leave=False, file=sys.stderr
    ) as bar:
        yield _Bar(bar, also or no_report)


@contextlib.contextmanager
def progress_bars() -> Iterator[StartPart]:
    """A bar for each part of the work that reports, removed when the next one does."""
    with contextlib.ExitStack() as shown:

        def start(label: str, unit: str) -> Progress:
            @functools.cache
            def bar() -> Progress:
                shown.close()
                return shown.enter_context(progress_bar(label, unit))

            def report(done: int, total: int) -> None:
                bar()(done, total)

            return report

        yield start


class _Bar:
    """A bar of tqdm as a `Progress`."""

    def __init__(self, bar: Any, also: Progress) -> None:
        self._bar, self._also = bar, also

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        self._also(done, total)

    def note(self, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)
