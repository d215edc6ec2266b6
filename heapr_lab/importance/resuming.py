"""What a pass needs beside the model: its sums in a file, and other processes."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from heapr_lab.errors import CacheError
from heapr_lab.models.backend import GradientPass
from heapr_lab.models.moments import LayerMoments
from heapr_lab.storage import files

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SAVE_SECONDS = 60.0
_SAVE_SHARE = 0.02


class SavedSums:
    """Saves the moments of all layers now and then, and reads what was saved.

    They are saved a minute after the last time, or later if it takes long to save them.
    """

    def __init__(self, run: GradientPass, check: Callable[[], None]) -> None:
        """Nothing is read or written yet.

        Args:
            run: the pass, whose sums, file and key they are; without a file nothing
                is saved.
            check: called before they are saved; raises if they are not valid.
        """
        self._run, self._check = run, check
        self._saved_at, self._cost = time.perf_counter(), 0.0

    def resume(self) -> int:
        """Give the moments what was saved; returns the windows that are done.

        Raises:
            CacheError: the file belongs to another pass, or is damaged.
        """
        path = self._run.state
        if path is None or not path.exists():
            return 0
        arrays, meta = files.load_state(path)
        if meta.get("key") != self._run.key:
            raise CacheError(
                f"{path} is the state of another pass (another model or "
                "calibration set); delete it, or give another file"
            )
        for number, moments in self._run.probes.items():
            state = {
                name.partition(".")[2]: torch.from_numpy(array)
                for name, array in arrays.items()
                if name.startswith(f"{number}.")
            }
            moments.load_state(state)
        logger.info("resumed %s at window %d", path, meta["done"])
        return int(meta["done"])

    def save(self, *, now: bool) -> None:
        """Save the moments of the windows that are done, if it is due or has to be now.

        Without a file for them nothing is saved.
        """
        begun = time.perf_counter()
        waited = begun - self._saved_at
        due = waited >= _SAVE_SECONDS and self._cost <= _SAVE_SHARE * waited
        path = self._run.state
        if path is None or not (now or due):
            return
        self._check()
        arrays = {
            f"{number}.{name}": tensor.numpy()
            for number, moments in self._run.probes.items()
            for name, tensor in moments.state().items()
        }
        files.save_state(path, arrays, {"key": self._run.key, "done": self._run.done})
        self._saved_at = time.perf_counter()
        self._cost = self._saved_at - begun


class Ranks(Protocol):
    """Processes that measure disjoint windows together, as one of them sees them."""

    def share(self, n_windows: int) -> range:
        """The windows of this process."""

    def own_state(self, path: Path) -> Path:
        """The file for its state."""

    def check_same(self, spec_hash: str) -> None:
        """Check that all measure the same."""

    def combine(self, moments: Sequence[LayerMoments]) -> None:
        """Replace its moments by those of all windows."""

    def stored(
        self, store: Callable[[Callable[[], T]], T], compute: Callable[[], T]
    ) -> T | None:
        """`store(compute)` in the first of them; the others compute if it does."""
