"""Progress: of one piece of work or of several, as a bar or as the time left."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

Progress = Callable[[int, int], None]
"""Called with (done, total) as work goes on; what it raises ends the work."""


def no_report(_done: int, _total: int) -> None:
    """The `Progress` that tells nobody."""


class Parts:
    """Progress of one part after another, reported as progress of the whole.

    It is the `Progress` of the part that is running; `end` goes on to the next.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        """Begin with the first part.

        Args:
            total: the sizes of all parts together.
            progress: what is told of the whole.
        """
        self.total = total
        self.done = 0
        self._before = 0
        self._report = progress or no_report

    def __call__(self, done: int, _of_part: int) -> None:
        """So much is done of the part that is running."""
        self.done = self._before + done
        self._report(self.done, self.total)

    def end(self, size: int) -> None:
        """The part is over; it may have reported less than its `size`, or nothing."""
        self._before += size
        self.done = self._before


class TimeLeft:
    """Estimates the time left: what remains takes as long, unit for unit, as before.

    Units: seconds; work in whatever is counted.

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
            clock: the time now.
        """
        self._clock = clock
        self._seconds = self._measured = 0.0
        self.skip_to(0)

    def skip_to(self, done: float) -> None:
        """So much is done, none of it by work since the last call: it was cached."""
        self._done, self._last = done, self._clock()

    def reached(self, done: float) -> None:
        """So much is done, by work; less than before begins another piece of work."""
        if done < self._done:
            self._seconds = self._measured = self._done = 0.0
        now = self._clock()
        self._seconds += now - self._last
        self._measured += done - self._done
        self._done, self._last = done, now

    def seconds(self, total: float) -> float | None:
        """Until `total` is done; None while nothing was measured."""
        if not self._measured:
            return None
        return self._seconds / self._measured * (total - self._done)


def time_left_text(seconds: float | None) -> str:
    """What follows a count, as `, about 1:05 left`; nothing where nothing is known."""
    if not seconds:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f", about {minutes}:{rest:02d} left"


def silent() -> bool:
    """Whether `$HEAPR_LAB_PROGRESS` is 0."""
    return os.environ.get("HEAPR_LAB_PROGRESS", "1") == "0"


@contextlib.contextmanager
def progress_bar(label: str, unit: str) -> Iterator[Progress]:
    """A bar to be called with (done, total): rate, time left; gone when finished.

    Shows nothing where `$HEAPR_LAB_PROGRESS` is 0.
    """
    with tqdm(
        desc=label, unit=unit, disable=silent(), leave=False, file=sys.stderr
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
