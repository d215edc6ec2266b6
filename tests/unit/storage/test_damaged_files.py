"""Files of this package that something has damaged: an error that names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from score_tables import TWO_LAYERS, make_table

from heapr_lab import ImportanceTable, KeepMask, read_provenance
from heapr_lab.errors import CacheError
from heapr_lab.storage import files

KEY = b"heapr_lab"


@pytest.fixture
def mask(tmp_path) -> Path:
    """A mask of two layers, two experts and three atoms each."""
    kept = [[True, False, True], [False, True, True]]
    path = tmp_path / "mask.parquet"
    KeepMask.from_arrays({0: kept, 3: kept}, estimator="heapr").write(path)
    return path


@pytest.fixture
def table(tmp_path) -> Path:
    """A table of two layers."""
    path = tmp_path / "table.parquet"
    make_table(TWO_LAYERS).write(path)
    return path


def change_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write `path` anew with another header; bytes are taken as they are."""
    rows = pq.read_table(path)
    header = change(json.loads(rows.schema.metadata[KEY]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    pq.write_table(
        rows.replace_schema_metadata({**rows.schema.metadata, KEY: text}), path
    )


def change_rows(path: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Write `path` anew with other rows under the same header."""
    rows = pq.read_table(path)
    new = pa.Table.from_pandas(change(rows.to_pandas()))
    metadata = {**new.schema.metadata, KEY: rows.schema.metadata[KEY]}
    pq.write_table(new.replace_schema_metadata(metadata), path)


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "not JSON": lambda _: b"{not json",
    "not UTF-8": lambda _: b"\xff\xfe",
    "nested deeply": lambda _: b"[" * 100_000,
    "a list": lambda _: [1],
    "null": lambda _: None,
    "no schema": lambda header: {"metadata": header["metadata"]},
    "schema a text": lambda header: header | {"schema": "1"},
    "no metadata": lambda header: {"schema": header["schema"]},
    "metadata a list": lambda header: header | {"metadata": [1]},
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_a_header_that_cannot_be_read(mask, table, change):
    """The header of a mask and of a table, for all who read them."""
    for path, read in ((mask, KeepMask.read), (table, ImportanceTable.read)):
        change_header(path, change)
        for reader in (read, read_provenance, files.read_frame, files.read_metadata):
            with pytest.raises(
                CacheError, match=rf"{path.name} is damaged: its 'heapr"
            ):
                reader(path)


def test_a_newer_file_is_refused(mask):
    """A file of a later schema version asks for an upgrade."""
    change_header(mask, lambda header: header | {"schema": files.SCHEMA_VERSION + 1})
    with pytest.raises(CacheError, match=r"mask\.parquet has schema version 2"):
        files.read_frame(mask)


@pytest.mark.parametrize("name", ["settings", "fingerprint"])
@pytest.mark.parametrize("value", [None, [1], "x", "absent"])
def test_a_mask_without_what_it_says_of_itself(mask, name, value):
    """A part is absent, or of another kind."""

    def change(header: dict[str, Any]) -> dict[str, Any]:
        header["metadata"][name] = value
        if value == "absent":
            del header["metadata"][name]
        return header

    change_header(mask, change)
    with pytest.raises(CacheError, match=r"mask\.parquet (is damaged|was changed)"):
        KeepMask.read(mask)


ROWS: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "a row": lambda frame: frame.iloc[1:],
    "all rows": lambda frame: frame.iloc[:0],
    "a column": lambda frame: frame.drop(columns="keep"),
    "whole numbers": lambda frame: frame.assign(expert=frame["expert"] + 0.5),
    "an expert": lambda frame: frame[frame["expert"] != 1],
    "the order": lambda frame: frame.iloc[::-1],
}


@pytest.mark.parametrize("change", ROWS.values(), ids=ROWS)
def test_a_mask_without_rows_or_columns(mask, change):
    """What is missing is never made up."""
    change_rows(mask, change)
    with pytest.raises(CacheError, match=r"mask\.parquet (is damaged|was changed)"):
        KeepMask.read(mask)


def test_columns_that_cannot_be_described(table):
    """What pandas has written of them was damaged."""
    rows = pq.read_table(table)
    for description in (b"{", b"[]", b'{"index_columns": 7}'):
        metadata = {**rows.schema.metadata, b"pandas": description}
        pq.write_table(rows.replace_schema_metadata(metadata), table)
        with pytest.raises(
            CacheError, match=r"table\.parquet is damaged: the description"
        ):
            files.read_frame(table)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "is truncated or is not JSON"),
        (b"\xff\xfe{", "cannot be read"),
    ],
)
def test_json_that_cannot_be_read(tmp_path, content, message):
    """It is nested deeper than Python reads, or not in UTF-8."""
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(CacheError, match=rf"odd\.json {message}.*give another file"):
        files.read_json(str(path))


@pytest.mark.parametrize("share", [0.0, 0.005, 0.04, 0.3, 0.9, 0.999])
@pytest.mark.parametrize(
    "read", [files.read_frame, files.read_metadata, files.load_state]
)
def test_a_file_that_is_cut_short_is_refused_and_left_alone(tmp_path, read, share):
    """It is cut anywhere, in its header or its rows, and may be named by a text."""
    path, numbers = tmp_path / "cut", {"x": np.arange(100.0)}
    if read is files.load_state:
        files.save_state(path, numbers, {})
    else:
        files.write_frame(path, pd.DataFrame(numbers), {})
    left = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(left)
    with pytest.raises(CacheError, match=r"cut cannot be read.*give another file"):
        read(str(path))
    assert path.read_bytes() == left
