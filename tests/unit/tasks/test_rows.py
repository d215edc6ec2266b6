"""Rows are computed once, some at a time, and an interrupt keeps what was computed."""

from collections.abc import Callable

import pandas as pd
import pytest
from heard import Heard

from heapr_lab.errors import CacheError
from heapr_lab.storage.cache import cache_path
from heapr_lab.storage.files import write_frame
from heapr_lab.tasks.items import cached_rows

KEY = {"state": "dense"}
pytestmark = pytest.mark.usefixtures("cache")


def squares(
    asked: list[list[int]], *, calls: int = 9
) -> Callable[[list[int]], pd.DataFrame]:
    """What squares numbers, notes them in `asked`, and fails after `calls`."""

    def compute(numbers: list[int]) -> pd.DataFrame:
        if len(asked) == calls:
            raise KeyboardInterrupt
        asked.append(numbers)
        back = numbers[::-1]
        return pd.DataFrame({"square": [float(n * n) for n in back]}, index=back)

    return compute


def test_only_missing_rows_are_computed():
    """Their order is that of the numbers, some at a time; another key has its own."""
    asked: list[list[int]] = []
    heard = Heard()
    first = cached_rows("rows", KEY, [5, 2, 4], squares(asked), at_once=2)
    assert first["square"].to_dict() == {5: 25.0, 2: 4.0, 4: 16.0}
    more = cached_rows(
        "rows", KEY, [9, 5, 1, 7], squares(asked), at_once=2, progress=heard
    )
    assert list(more.index) == [9, 5, 1, 7]
    assert asked == [[5, 2], [4], [9, 1], [7]]
    assert heard == [(1, 4), (3, 4), (4, 4)]
    cached_rows("rows", {"state": "pruned"}, [5], squares(asked), at_once=2)
    assert asked[4:] == [[5]]


def test_an_interrupt_keeps_what_was_computed():
    """All rows stay but those that were being computed."""
    asked: list[list[int]] = []
    with pytest.raises(KeyboardInterrupt):
        cached_rows("rows", KEY, range(6), squares(asked, calls=2), at_once=2)
    rows = cached_rows("rows", KEY, range(6), squares(asked), at_once=2)
    assert asked == [[0, 1], [2, 3], [4, 5]]
    assert rows["square"].tolist() == [0.0, 1.0, 4.0, 9.0, 16.0, 25.0]


def test_rows_of_another_key_are_refused():
    """A file that was renamed, say."""
    frame = pd.DataFrame({"square": [1.0]}, index=[1])
    write_frame(cache_path("rows", KEY, extension="parquet"), frame, {"state": "else"})
    with pytest.raises(CacheError, match="made for another key"):
        cached_rows("rows", KEY, [1], squares([]), at_once=1)
