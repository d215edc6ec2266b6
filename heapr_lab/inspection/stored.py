"""Results by window or by item, kept for each state of a model.

A state is the model with its weights and dtype, and with the mask and the replaced
W_down that are active around the call. What was measured in a state, in this process or
another, is read from the cache: all rows of a key are in one file, which is written
again whenever some are added, so that an interrupted measurement goes on where it was.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from heapr_lab.models.backend import backend_of
from heapr_lab.models.identity import check_unchanged, identity_in_force, weights_state
from heapr_lab.progress import Progress, no_report
from heapr_lab.storage.cache import cache_path, check_same_key, lock
from heapr_lab.storage.disk import writable
from heapr_lab.storage.files import read_frame, write_frame

_SCHEMA = 1
"""Increased whenever results change for the same input."""

Compute = Callable[[list[int]], pd.DataFrame]
"""Makes the rows of these numbers."""


class State:
    """The present state of a model, in which rows are computed once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.identity = identity_in_force(model)
        self._weights = weights_state(model)

    def key(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The key of rows that the model computes in this state."""
        return {"schema": _SCHEMA, "model": self.identity, **fields}

    def checked(self, compute: Compute) -> Compute:
        """`compute`, after which the weights must be those of this state."""

        def of_one_model(missing: list[int]) -> pd.DataFrame:
            frame = compute(missing)
            check_unchanged(self.model, self._weights)
            return frame

        return of_one_model

    def at_once(self, n: int) -> int:
        """Rows to compute before a file is written: n, or more for layers on disk."""
        return backend_of(self.model).at_once(self.model, n)


# --- rows in files ----------------------------------------------------------------


def cached_rows(
    kind: str,
    key: Mapping[str, Any],
    numbers: Sequence[int],
    compute: Compute,
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
    check_same_key(path, stored, key)
    return rows
