"""How a command that cannot go on says so: in one line, with what to do.

Without torch.
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

_RESUMED = {
    "evaluate": "what was measured is kept, the same command goes on from there",
    "figures": "what was measured is kept, the same command goes on from there",
    "prune": "what was measured is kept, the same command goes on from there",
    "reproduce": "what was measured is kept, the same command goes on from there",
    "score": "the same command goes on from the last state that was saved",
    "train-lab-model": "the same command goes on from the last state that was saved",
}
"""What is left of a command that was interrupted; of others, nothing is begun."""


def line_of(error: BaseException) -> str | None:
    """The line for an error that a user can do something about; None for others."""
    if isinstance(error, HeaprLabError):
        return str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            f"not enough memory ({error or 'none left'}): take shorter or fewer "
            "windows (--seq-len, --profile), a smaller dtype, or another device"
        )
    failed = _os_error(error)
    return None if failed is None else f"{_what(failed)}: {_remedy(failed)}"


def line_of_interrupt(command: str | None) -> str:
    """What to tell somebody who has pressed Control-C."""
    left = _RESUMED.get(command or "")
    return "interrupted" + (f"; {left}" if left else "")


def _os_error(error: BaseException) -> OSError | None:
    """The system's error behind `error`; safetensors has it in its text alone."""
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

    kept = f"$HEAPR_CACHE_DIR (now {cache_dir()}) for what is kept"
    elsewhere = f"choose another place, --out for what is written, {kept}"
    if error.errno in _NO_ROOM:
        return f"free some space, or {elsewhere}"
    if error.errno in _NO_RIGHT:
        return elsewhere
    if error.errno in _NO_SUCH_PLACE:
        return f"something on this path is missing or of another kind; {elsewhere}"
    return f"mend that and start again, or {elsewhere}"
