"""Errors that a user can correct, in one line that says what to do.

Importing this needs no torch.
"""

import errno
import os
import re

from safetensors import SafetensorError

from heapr_lab.errors import HeaprLabError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_RIGHT = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_SUCH_PLACE = {
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
}
_NUMBER = re.compile(r"\(os error (\d+)\)")

_CACHED = "measurements are kept, and the same command continues from there"
_SAVED = "the same command continues from the last saved state"
_RESUMED = {
    **dict.fromkeys(["compare", "evaluate", "figures", "prune", "reproduce"], _CACHED),
    **dict.fromkeys(["score", "train-lab-model"], _SAVED),
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
    failed = _os_error(error)
    return None if failed is None else f"{_what(failed)}: {_remedy(failed)}"


def line_of_interrupt(command: str | None) -> str:
    """One line for a command that Control-C has interrupted."""
    left = _RESUMED.get(command or "")
    return "interrupted" + (f"; {left}" if left else "")


def _os_error(error: BaseException) -> OSError | None:
    """The system's error behind `error`; safetensors has it only as text."""
    if isinstance(error, OSError):
        return error
    number = _NUMBER.search(str(error))
    if isinstance(error, SafetensorError) and number:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    return None


def _what(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    places = [name for name in (error.filename, error.filename2) if name]
    return f"{error.strerror}: {places[-1]}" if places else error.strerror


def _remedy(error: OSError) -> str:
    from heapr_lab.storage.paths import cache_dir

    cache = f"$HEAPR_CACHE_DIR (now {cache_dir()}) for the cache"
    elsewhere = f"choose another place: --out for the results, {cache}"
    if error.errno in _NO_ROOM:
        return f"free some space, or {elsewhere}"
    if error.errno in _NO_RIGHT:
        return elsewhere
    if error.errno in _NO_SUCH_PLACE:
        return f"part of this path is missing or is not a folder; {elsewhere}"
    return f"correct this and start again, or {elsewhere}"
