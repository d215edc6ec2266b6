"""Progress with an ETA for people, silence for machines."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm


def silent() -> bool:
    """Whether `$HEAPR_LAB_PROGRESS` is 0."""
    return os.environ.get("HEAPR_LAB_PROGRESS", "1") == "0"


@contextlib.contextmanager
def progress_bar(label: str, unit: str) -> Iterator[Callable[[int, int], None]]:
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
