"""Errors of the disk, in one line that says what to do."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from heapr_lab.errors import SpecError
from heapr_lab.storage.paths import cache_dir

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


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Errors of the disk while `path` is written become one that says what to do.

    Raises:
        SpecError: it cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        line = disk_error(error, path) or f"{path} could not be written ({error})"
        raise SpecError(line) from error


def disk_error(error: BaseException, path: Path | None = None) -> str | None:
    """One line for an error of the system; None for another error.

    Args:
        error: any error; safetensors has one of its own, which names the system's.
        path: what was read or written, if the error does not name it.
    """
    if isinstance(error, OSError):
        return f"{_what(error, path)}: {_remedy(error)}"
    number = _NUMBER.search(str(error))
    if isinstance(error, SafetensorError) and number:
        cause = OSError(int(number[1]), os.strerror(int(number[1])))
        return disk_error(cause, path)
    return None


def _what(error: OSError, path: Path | None) -> str:
    if error.strerror is None:
        return str(error)
    places = [name for name in (path, error.filename, error.filename2) if name]
    return f"{error.strerror}: {places[-1]}" if places else error.strerror


def _remedy(error: OSError) -> str:
    cache = f"$HEAPR_CACHE_DIR (now {cache_dir()}) for the cache"
    elsewhere = f"choose another place for the results (--out), or {cache}"
    if error.errno in _NO_ROOM:
        return f"free some space, or {elsewhere}"
    if error.errno in _NO_RIGHT:
        return elsewhere
    if error.errno in _NO_SUCH_PLACE:
        return f"part of this path is missing or is not a folder; {elsewhere}"
    return f"correct this and start again, or {elsewhere}"
