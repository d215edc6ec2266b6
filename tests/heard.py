"""What tests hand over as `progress`: it notes what it is told, or ends the work."""

from collections.abc import Callable
from typing import Any


class Heard(list[Any]):
    """All that was said, call by call."""

    def __call__(self, *words: Any) -> None:
        """Note one call."""
        self.append(words)

    def __bool__(self) -> bool:
        """It is a progress before anything is said, too."""
        return True


def stop_at(
    n_done: int, error: type[BaseException] = KeyboardInterrupt
) -> Callable[..., None]:
    """A progress that raises `error` once so much is done."""

    def stop(done: int, *_: object) -> None:
        if done >= n_done:
            raise error

    return stop
