"""Cached results: a result that was computed once is read from its file afterwards.

Without torch. `paths` has the cache's folder, `files` reads and writes the files; this
module names them by the hash of their inputs and locks them while they are written.
"""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import filelock

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage.files import read_json, remedy, replacing, share_mode, write_json
from heapr_lab.storage.hashing import canonical_json, digest
from heapr_lab.storage.paths import cache_dir, writable

_Value = TypeVar("_Value")

logger = logging.getLogger(__name__)


# --- places ---------------------------------------------------------------------


def cache_path(kind: str, key: Mapping[str, Any], *, extension: str) -> Path:
    """Path of the result of kind `kind` for `key`, whether it exists or not."""
    return cache_dir() / kind / f"{digest(dict(key))[:16]}.{extension}"


def lock(path: Path | str) -> filelock.BaseFileLock:
    """A lock on `path` among all processes and threads, to be used in `with`."""
    path = Path(path)
    return filelock.FileLock(path.with_name(f"{path.name}.lock"))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Exclusive right to write the output `path`, among processes and threads.

    Others do not wait, because the output would exist by then. The lock file is beside
    `path` while the block runs; the lock also ends with its process.

    Raises:
        SpecError: another process or thread has it, or the folder is not writable.
    """
    name = path.with_name(f".partial-{path.name}.lock")
    guard = filelock.FileLock(name)
    try:
        guard.acquire(timeout=0)
    except filelock.Timeout as error:
        raise SpecError(
            f"{path} is being written by another process or thread: wait until that "
            "has ended, or give another name"
        ) from error
    except OSError as error:
        raise SpecError(
            f"nothing can be written to {path.parent} ({error.strerror}): give a "
            "folder in which files can be created"
        ) from error
    try:
        yield
    finally:
        name.unlink(missing_ok=True)  # before the release: the next one makes its own
        guard.release()


# --- cached results -------------------------------------------------------------


def cached(
    kind: str,
    key: Mapping[str, Any],
    compute: Callable[[], _Value],
    *,
    read: Callable[[Path], _Value],
    write: Callable[[Path, _Value], None],
    extension: str = "parquet",
) -> _Value:
    """The stored result for `key`, or `compute()`, stored.

    The result is stored in `cache_dir()/kind` under the hash of `key`, with the
    readable key in a `.key.json` file beside it. While one thread or process computes a
    result, others that ask for it wait.

    Args:
        kind: the folder, such as `importance`.
        key: every field that determines the result, as plain data.
        compute: computes the result.
        read: reads a result from a path; raises `CacheError` for one it cannot read.
        write: writes a result to a path.
        extension: the end of the file's name, without the dot.
    """
    path = cache_path(kind, key, extension=extension)
    with _to_be_made(path) as missing:
        if missing:
            value = compute()
            # The key first: a result without a key is then never one of ours.
            write_json(_key_path(path), dict(key))
            with replacing(path) as temporary:
                write(temporary, value)
            return value
    _check_key(path, key)
    return read(path)


def cached_json(kind: str, key: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
    """As `cached`, for a result that is plain data."""
    return cached(
        kind, key, compute, read=read_json, write=write_json, extension="json"
    )


def cached_folder(
    kind: str, key: Mapping[str, Any], make: Callable[[Path], None], *, name: str
) -> Path:
    """The stored folder for `key`, or what `make` writes into an empty one.

    It is `name` in a folder of `cache_dir()/kind` under the hash of `key`, and is seen
    only when it is complete. While one thread or process makes it, others wait.

    Args:
        kind: the folder, such as `models`.
        key: every field that determines the files, as plain data.
        make: writes the files; what it writes beside the folder is deleted afterwards.
        name: the name of the folder itself.

    Raises:
        SpecError: it cannot be written, as where the disk is full.
        CacheError: there is a folder of another key, or one without its key.
    """
    folder = cache_dir() / kind / digest(dict(key))[:16] / name
    with writable(folder), _to_be_made(folder) as missing:
        if missing:
            write_json(_key_path(folder), dict(key))
            _make(folder, make)
    _check_key(folder, key)
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    """Write a new folder under a temporary name; the lock on it is held."""
    for left in folder.parent.glob(".partial-*"):  # of processes that were killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as place:
        partial = Path(place) / folder.name
        partial.mkdir()
        make(partial)
        share_mode(partial, like=_key_path(folder))
        partial.replace(folder)


@contextlib.contextmanager
def _to_be_made(path: Path) -> Iterator[bool]:
    """Whether `path` is missing; if it is, others wait until the block has ended."""
    if path.exists():
        yield False
        return
    guard = lock(path)
    with writable(path):
        try:
            hold = guard.acquire(timeout=0)
        except filelock.Timeout:
            logger.info("waiting for %s, which another is computing", path)
            hold = guard.acquire()
    with hold:
        yield not path.exists()


def _key_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.key.json")


def _check_key(path: Path, key: Mapping[str, Any]) -> None:
    """Check that the result at `path` was made for `key`.

    Raises:
        CacheError: it was made for another key, or its key is missing or damaged.
    """
    key_path = _key_path(path)
    if not key_path.exists():
        raise CacheError(
            f"{path} is foreign: expected {key_path.name} beside it, which says what "
            f"it was made for; {remedy(path)}"
        )
    try:
        stored = read_json(key_path)
    except CacheError as error:
        raise CacheError(
            f"{key_path} is truncated or is not JSON, expected what {path.name} was "
            "made for; move both away or delete them, and they will be made again"
        ) from error
    check_same_key(path, stored, key)


def check_same_key(path: Path, stored: Any, key: Mapping[str, Any]) -> None:
    """Check that a file of the cache was made for a key.

    Raises:
        CacheError: it was made for another one.
    """
    if canonical_json(stored) != canonical_json(dict(key)):
        raise CacheError(
            f"{path} was made for another key, found {canonical_json(stored)}, "
            f"expected {canonical_json(dict(key))}; {remedy(path)}"
        )
