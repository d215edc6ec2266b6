"""Progress: of one piece of work or of several, as a bar or as calls."""

import contextlib
import os
import sys
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
