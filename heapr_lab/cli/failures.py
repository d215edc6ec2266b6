"""Errors that a user can correct, in one line that says what to do.

Importing this needs no torch.
"""

from heapr_lab.errors import HeaprLabError
from heapr_lab.storage.disk import disk_error

_CACHED = "measurements are kept, and the same command continues from there"
_SAVED = "the same command continues from the last saved state"
_RESUMED = {
    **dict.fromkeys(["compare", "evaluate", "prune", "reproduce"], _CACHED),
    "score": _SAVED,
}
"""What remains of an interrupted command; other commands leave nothing behind."""


def line_of(error: BaseException) -> str | None:
    """One line for an error that the user can correct; None for other errors."""
    if isinstance(error, HeaprLabError):
        return str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            f"not enough memory ({error or 'none left'}): use shorter or fewer "
            "windows (--seq-len, --profile), a smaller dtype or another device"
        )
    return disk_error(error)


def line_of_interrupt(command: str | None) -> str:
    """One line for a command that Control-C has interrupted."""
    left = _RESUMED.get(command or "")
    return "interrupted" + (f"; {left}" if left else "")
