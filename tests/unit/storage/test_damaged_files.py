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

from heapr_lab import ImportanceTable, KeepMask, read_provenance
from heapr_lab.errors import CacheError
from heapr_lab.storage import files
from heapr_lab.storage.hashing import digest

KEY = b"heapr_lab"
FRAME = pd.DataFrame(
    {
        "layer": np.repeat([0, 1], 4),
        "expert": np.tile([0, 0, 1, 1], 2),
        "atom": np.tile([0, 1], 4),
        "sum_hg2": np.arange(8.0),
    }
)


@pytest.fixture
def mask(tmp_path) -> Path:
    """A mask of two layers, two experts and three atoms each."""
    kept = [[True, False, True], [False, True, True]]
    path = tmp_path / "mask.parquet"
    KeepMask.from_arrays({0: kept, 3: kept}, estimator="heapr").write(path)
    return path


@pytest.fixture
def table(tmp_path) -> Path:
    """A table of eight atoms."""
    path = tmp_path / "table.parquet"
    spec = {"schema": 1}
    facts = {"spec": spec, "spec_hash": digest(spec), "architecture": {}}
    ImportanceTable.from_frame(FRAME, N=5, provenance={}, **facts).write(path)
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
    "first row": lambda frame: frame.iloc[1:],
    "a row within": lambda frame: frame.drop(index=frame.index[4]),
    "an expert": lambda frame: frame[frame["expert"] != 1],
    "all rows": lambda frame: frame.iloc[:0],
    "layer": lambda frame: frame.drop(columns="layer"),
    "expert": lambda frame: frame.drop(columns="expert"),
    "atom": lambda frame: frame.drop(columns="atom"),
    "keep": lambda frame: frame.drop(columns="keep"),
    "names of layers": lambda frame: frame.assign(layer="x"),
    "halves of experts": lambda frame: frame.assign(expert=frame["expert"] + 0.5),
    "no truth values": lambda frame: frame.assign(keep="x"),
    "twice": lambda frame: pd.concat([frame, frame]),
    "another order": lambda frame: frame.iloc[::-1],
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


def test_json_that_is_nested_deeply(tmp_path):
    """JSON nested deeper than Python reads."""
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(CacheError, match=r"deep\.json is truncated or is not JSON"):
        files.read_json(path)
