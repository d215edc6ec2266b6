"""A disk that is full, or a folder that cannot be written: one line, nothing lost."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_model
from keeps import full_keep
from score_tables import make_table

from heapr_lab import KeepMask, prune, save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.figures.files import write_files
from heapr_lab.storage import cache, files, paths
from heapr_lab.tasks import items

MASK = KeepMask.from_arrays({0: [[True, False]]})


@contextmanager
def full_disk() -> Iterator[None]:
    """The system refuses to write a byte to any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def checkpoint(folder: Path) -> None:
    """Save a model that is pruned of nothing."""
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    save_pruned(prune(model, full_keep(model)), folder)


def row(numbers: list[int]) -> pd.DataFrame:
    """A row for each number."""
    return pd.DataFrame({"x": 1.0}, index=numbers)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a mask": MASK.write,
    "a table": lambda path: make_table({0: [[1.0, 2.0]]}).write(path),
    "JSON": lambda path: files.write_json(path, [1]),
    "a state": lambda path: files.save_state(path, {"x": np.ones(9)}, {}),
    "a figure": lambda path: write_files(path, {"csv": b"1"}),
    "a checkpoint": checkpoint,
    "a result": lambda _: cache.cached_json("kind", {}, lambda: [1]),
    "rows": lambda _: items.cached_rows("kind", {}, [1], row, at_once=1),
    "a folder": lambda _: cache.cached_folder(
        "kind", {}, lambda folder: MASK.write(folder / "mask"), name="x"
    ),
}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_is_one_line(write, tmp_path):
    """An error of this package with what to do; no file is left of what was begun."""
    with full_disk(), pytest.raises(SpecError, match=r"(?i)file too large") as error:
        write(tmp_path / "out")
    assert "another" in str(error.value)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"]
    write(tmp_path / "out")


def test_a_cache_below_a_file_is_one_line(tmp_path, monkeypatch):
    """Wherever it is asked for something."""
    (tmp_path / "file").write_text("a file")
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for name in ("a result", "rows", "a folder"):
        with pytest.raises(SpecError, match="Not a directory"):
            WRITERS[name](tmp_path)


def test_other_errors_are_left_as_they_are(tmp_path):
    """A mistake in what is written is not one of the disk."""
    with pytest.raises(ZeroDivisionError), paths.writable(tmp_path):
        _ = 1 / 0
    assert paths.disk_error(ZeroDivisionError()) is None
