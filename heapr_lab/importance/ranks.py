"""What a pass needs of the other processes that take part in it, if there are any."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from heapr_lab.models.moments import LayerMoments

T = TypeVar("T")


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
