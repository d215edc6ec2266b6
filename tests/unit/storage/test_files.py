"""How a file takes the place of another, and how it is laid out."""

import json
import os
import re
import stat
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from heapr_lab.errors import CacheError
from heapr_lab.storage import files


def mode(path: Path) -> int:
    """The permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


# --- replacing ------------------------------------------------------------------


def test_the_temporary_file_itself_becomes_the_file(tmp_path):
    """It is renamed, not copied: whoever reads the old file goes on reading that."""
    path = tmp_path / "x.txt"
    path.write_text("old")
    with path.open() as reader:
        with files.replacing(path) as temporary:
            temporary.write_text("new")
            written = temporary.stat().st_ino
            assert path.read_text() == "old"
        assert reader.read() == "old"
    assert path.stat().st_ino == written
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_temporary_names(tmp_path):
    """They are beside the file, with its extension, and differ between writers.

    Of a link they are beside its target, perhaps on another disk than the link is.
    """
    path, link = tmp_path / "a" / "b" / "x.parquet", tmp_path / "link"
    link.symlink_to(path)
    with files.replacing(path) as first, files.replacing(link) as second:
        assert first != second
        for name in (first, second):
            assert name.parent == path.parent
            assert re.fullmatch(r"\.partial-[0-9a-f]{8}-x\.parquet", name.name)
            name.write_text("x")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_who_may_read_a_file_is_asked_of_the_umask(tmp_path, umask):
    """Also where its writer, as that of safetensors, asks nobody."""
    before = os.umask(umask)
    try:
        with files.replacing(tmp_path / "x.safetensors") as temporary:
            save_file({"x": np.ones(2)}, temporary)
            temporary.chmod(0o600)
    finally:
        os.umask(before)
    assert mode(tmp_path / "x.safetensors") == 0o666 & ~umask


def test_a_folder_can_take_a_name_too(tmp_path):
    """Its own permissions stay."""
    with files.replacing(tmp_path / "folder") as temporary:
        temporary.mkdir(mode=0o750)
    assert mode(tmp_path / "folder") == 0o750


# --- layout ---------------------------------------------------------------------


def test_columns_are_laid_out_by_their_types(tmp_path):
    """Floats are split into byte streams; all else has a dictionary."""
    path, rows = tmp_path / "x.parquet", np.arange(3000)
    random = np.random.default_rng(0).normal(size=3000).astype(np.float32)
    runs = random[rows // 10].astype(np.float64)
    columns = {"integer": rows, "text": "a", "random": random, "runs": runs}
    files.write_frame(path, pd.DataFrame(columns), {})
    group = pq.ParquetFile(path).metadata.row_group(0)
    for place, name in enumerate(columns):
        column, split = group.column(place), name in ("random", "runs")
        assert (column.path_in_schema, column.compression) == (name, "ZSTD")
        assert ("BYTE_STREAM_SPLIT" in column.encodings) == split
        assert column.has_dictionary_page != split


def test_json_is_for_reading(tmp_path):
    """Indented, in letters rather than escapes, and ended by a new line."""
    path = tmp_path / "x.json"
    files.write_json(str(path), {"b": "ℓ", "a": 1})
    assert path.read_text("utf-8") == '{\n  "a": 1,\n  "b": "ℓ"\n}\n'
    assert files.read_json(str(path)) == {"a": 1, "b": "ℓ"}


# --- reading --------------------------------------------------------------------


def test_a_path_in_the_cache_may_be_relative(tmp_path, monkeypatch):
    """What lies in the cache is the same, however its folder is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEAPR_CACHE_DIR", "cache")
    absolute = tmp_path / "cache" / "x"
    assert files.remedy(absolute) == files.remedy(Path("cache/x"))
    assert files.remedy(absolute) == (
        "move it away or delete it, and it will be made again"
    )
    assert files.remedy(tmp_path / "x") == (
        "give another file, or make it again with the command that wrote it"
    )


def test_a_state_without_our_header_is_foreign(tmp_path):
    """It has no metadata at all, or another program's."""
    path = tmp_path / "s.safetensors"
    for metadata in (None, {"format": "pt"}):
        save_file({"x": np.ones(2)}, path, metadata=metadata)
        with pytest.raises(CacheError, match="was not written by heapr_lab"):
            files.load_state(path)


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_of_a_state_is_noticed(tmp_path, bit):
    """Wherever it is, the file is refused by name, or has what was written."""
    path = tmp_path / "s.safetensors"
    arrays = {"x": np.arange(4.0), "n": np.array(7)}
    files.save_state(path, arrays, {"done": 3})
    whole = path.read_bytes()
    refused = []
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        try:
            loaded, meta = files.load_state(path)
        except CacheError as error:
            refused.append(str(error))
            continue
        assert meta == {"done": 3}
        for name, array in arrays.items():
            np.testing.assert_array_equal(loaded[name], array, strict=True)
    assert all(path.name in message for message in refused)
    assert len(refused) > 0.8 * len(whole)


def test_a_state_without_a_checksum_is_refused(tmp_path):
    """A state as versions wrote it that knew none: who changed it nobody knows."""
    path = tmp_path / "s.safetensors"
    header = {"schema": 1, "metadata": {"done": 3}}
    save_file({"x": np.ones(2)}, path, metadata={"heapr_lab": json.dumps(header)})
    with pytest.raises(CacheError, match=r"checksum \(none\) .*make it again"):
        files.load_state(path)


def test_checksum_is_that_of_the_bytes(tmp_path):
    """SHA-256 of "abc", as FIPS 180-2 has it."""
    (tmp_path / "x").write_bytes(b"abc")
    assert files.checksum(tmp_path / "x") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
