"""Cached rows: a row that was computed once is read from its file afterwards.

Without torch. All rows of a key are in one file, which is written again whenever some
are added, so that an interrupted computation goes on where it was.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from heapr_lab.errors import CacheError
from heapr_lab.progress import Progress, no_report
from heapr_lab.storage.cache import cache_path, lock
from heapr_lab.storage.disk import writable
from heapr_lab.storage.files import read_frame, remedy, write_frame
from heapr_lab.storage.hashing import canonical_json


def cached_rows(
    kind: str,
    key: Mapping[str, Any],
    numbers: Sequence[int],
    compute: Callable[[list[int]], pd.DataFrame],
    *,
    at_once: int,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """The rows with these `numbers`, in their order; those that are missing are made.

    While one thread or process computes rows of a key, others that ask for it wait.

    Args:
        kind: the folder in the cache, such as `task_items`.
        key: every field that determines the rows, as plain data.
        numbers: the numbers of the rows, which are the index of the frame.
        compute: the rows with given numbers, which are their index, in any order.
        at_once: rows computed before the file is written; an interrupt loses so many.
        progress: called with (rows done, rows in all).
    """
    path = cache_path(kind, key, extension="parquet")
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    report = progress or no_report
    with lock(path):
        rows = _read(path, key)
        stored = set() if rows is None else set(rows.index)
        missing = [number for number in numbers if number not in stored]
        done = len(numbers) - len(missing)
        report(done, len(numbers))
        for start in range(0, len(missing), at_once):
            batch = compute(missing[start : start + at_once])
            rows = batch if rows is None else pd.concat([rows, batch])
            write_frame(path, rows, dict(key))
            report(min(done + start + at_once, len(numbers)), len(numbers))
    return pd.DataFrame() if rows is None else rows.loc[list(numbers)]


def _read(path: Path, key: Mapping[str, Any]) -> pd.DataFrame | None:
    """The rows stored for `key`; None if there are none.

    Raises:
        CacheError: the file was made for another key.
    """
    if not path.exists():
        return None
    rows, stored = read_frame(path)
    if canonical_json(stored) != canonical_json(dict(key)):
        raise CacheError(
            f"{path} was made for another key, found {canonical_json(stored)}, "
            f"expected {canonical_json(dict(key))}; {remedy(path)}"
        )
    return rows
