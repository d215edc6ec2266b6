"""Files are whole or absent, what is foreign is refused, and results are made once."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage import cache as store
from heapr_lab.storage import files, paths
from heapr_lab.storage.files import SCHEMA_VERSION
from heapr_lab.storage.hashing import digest

FRAME = pd.DataFrame(
    {
        "layer": np.array([0, 0, 1], dtype=np.int16),
        "tokens": np.array([5, 5, 7], dtype=np.int64),
        "sum_h2": np.array([0.5, -1.25, 3.0], dtype=np.float32),
        "note": ["a", "b", "a"],
    }
)


pytestmark = pytest.mark.usefixtures("cache")


# --- places ---------------------------------------------------------------------


def test_cache_dir_without_setting_is_the_users_cache_folder(monkeypatch, tmp_path):
    """$HEAPR_CACHE_DIR comes first, then $XDG_CACHE_HOME, then ~/.cache.

    A tilde is the user's home; an empty setting is none.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("HEAPR_CACHE_DIR", "~/mine")
    assert paths.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("HEAPR_CACHE_DIR")
    assert paths.cache_dir() == tmp_path / "xdg" / "heapr_lab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HEAPR_CACHE_DIR", "")
    assert paths.cache_dir() == tmp_path / ".cache" / "heapr_lab"


def test_a_result_lies_under_the_hash_of_its_key(cache):
    """Kind, then sixteen digits: the names that earlier results have."""
    path = store.cache_path("kind", {"x": 1}, extension="json")
    assert path == cache / "kind" / f"{digest({'x': 1})[:16]}.json"
    assert path.name == "5041bf1f713df204.json"


# --- parquet --------------------------------------------------------------------


def test_frame_round_trip_keeps_values_types_and_metadata(tmp_path):
    """What is read is what was written, columns chosen or not, and can be changed."""
    path = tmp_path / "deep" / "x.parquet"
    files.write_frame(path, FRAME, {"N": 3, "spec": {"dtype": "float32"}})
    frame, metadata = files.read_frame(path)
    pd.testing.assert_frame_equal(frame, FRAME)
    assert metadata == {"N": 3, "spec": {"dtype": "float32"}}
    assert files.read_metadata(path) == metadata
    some, _ = files.read_frame(path, ["sum_h2"])
    pd.testing.assert_frame_equal(some, FRAME[["sum_h2"]])
    some.loc[0, "sum_h2"] = 9.0
    assert some["sum_h2"].tolist() == [9.0, -1.25, 3.0]


def test_frame_round_trip_keeps_another_index(tmp_path):
    """An index that is not a plain range comes back, with chosen columns too."""
    indexed = FRAME.set_index(pd.Index([7, 3, 5], name="row"))
    files.write_frame(tmp_path / "x.parquet", indexed, {})
    pd.testing.assert_frame_equal(
        files.read_frame(tmp_path / "x.parquet", ["layer"])[0], indexed[["layer"]]
    )


def test_missing_column_is_named(tmp_path):
    """Asking for a column that is not there names it and those that are."""
    path = tmp_path / "x.parquet"
    files.write_frame(path, FRAME, {})
    with pytest.raises(CacheError, match="no column max_abs_h; it has layer, tokens"):
        files.read_frame(path, ["layer", "max_abs_h"])


def test_metadata_that_is_not_plain_leaves_no_file(tmp_path):
    """Metadata that JSON cannot hold is refused before anything is written."""
    with pytest.raises(SpecError):
        files.write_frame(tmp_path / "x.parquet", FRAME, {"bad": {1, 2}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_parquet_is_refused_and_left_alone(tmp_path, share):
    """A file cut short anywhere is an error that names it, and is not touched."""
    path = tmp_path / "cut.parquet"
    files.write_frame(path, FRAME, {})
    left = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(left)
    with pytest.raises(CacheError, match=r"cut\.parquet cannot be read"):
        files.read_frame(path)
    with pytest.raises(CacheError, match=r"cut\.parquet cannot be read"):
        files.read_metadata(path)
    assert path.read_bytes() == left


def test_a_flipped_byte_is_noticed(tmp_path):
    """Damage inside a data page fails its checksum; no wrong number is returned."""
    path = tmp_path / "x.parquet"
    frame = pd.DataFrame({"x": np.arange(5000, dtype=np.float32) ** 2})
    files.write_frame(path, frame, {})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CacheError, match=r"x\.parquet cannot be read"):
        files.read_frame(path)


def test_newer_parquet_is_refused(tmp_path):
    """A file of a later schema version asks for an upgrade."""
    header = json.dumps({"schema": SCHEMA_VERSION + 1, "metadata": {}})
    table = pa.table({"x": [1]}).replace_schema_metadata({"heapr_lab": header})
    path = tmp_path / "later.parquet"
    pq.write_table(table, path)
    with pytest.raises(CacheError, match=r"later\.parquet has schema version 2"):
        files.read_frame(path)


def test_missing_file_is_not_a_damaged_one(tmp_path):
    """A file that does not exist is a FileNotFoundError, for every reader."""
    for read in (files.read_frame, files.read_json, files.load_state):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "nowhere")


# --- atomic writes --------------------------------------------------------------


def test_an_exception_while_writing_leaves_the_old_file(tmp_path):
    """A writer that fails half-way leaves what was there, and no rest of its own."""
    path = tmp_path / "x.txt"
    path.write_text("old")

    def write_half() -> None:
        with files.replacing(path) as temporary:
            temporary.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_right_to_write_passes_on(tmp_path):
    """After the block, also after one that failed; other outputs are free."""

    def use() -> None:
        with store.writing(tmp_path / "x"), store.writing(tmp_path / "y"):
            with (
                pytest.raises(SpecError, match="is being written by another"),
                store.writing(tmp_path / "x"),
            ):
                pass
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            use()
    assert list(tmp_path.iterdir()) == []


# --- JSON and states ------------------------------------------------------------


def test_state_round_trip(tmp_path):
    """Arrays of any layout and shape come back exactly, with the meta."""
    arrays = {
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    files.save_state(tmp_path / "s.safetensors", arrays, {"batch": 3})
    loaded, meta = files.load_state(tmp_path / "s.safetensors")
    assert meta == {"batch": 3}
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)


def test_truncated_state_is_refused(tmp_path):
    """A state cut short names the file, whether header or data is cut."""
    path = tmp_path / "s.safetensors"
    files.save_state(path, {"x": np.arange(100.0)}, {})
    whole = path.read_bytes()
    for length in (0, 5, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CacheError, match=r"s\.safetensors cannot be read"):
            files.load_state(path)


# --- cached results -------------------------------------------------------------


def cached_answer(key: dict[str, int], runs: list[int]) -> int:
    """A cached computation that notes that it ran."""

    def compute() -> int:
        runs.append(1)
        return key["x"] * 10

    return int(store.cached_json("answers", key, compute))


@pytest.fixture
def path(cache) -> Path:
    """The file of the answer to {"x": 4}."""
    return store.cache_path("answers", {"x": 4}, extension="json")


def test_a_result_is_computed_once_per_key(path):
    """The second asking reads; another key computes; the key is readable beside."""
    runs: list[int] = []
    assert [cached_answer({"x": x}, runs) for x in (4, 4, 5)] == [40, 40, 50]
    assert len(runs) == 2
    assert files.read_json(path) == 40
    assert files.read_json(path.with_name(f"{path.name}.key.json")) == {"x": 4}


def test_a_truncated_result_is_refused_and_never_replaced(path):
    """A damaged file under a result's name is named, not recomputed over."""
    cached_answer({"x": 4}, [])
    path.write_text('{"val')
    runs: list[int] = []
    with pytest.raises(CacheError, match=path.name):
        cached_answer({"x": 4}, runs)
    assert runs == []
    assert path.read_text() == '{"val'


def test_a_foreign_result_is_refused_and_never_replaced(path):
    """A readable file that this cache did not put there is not taken for a result."""
    path.parent.mkdir(parents=True)
    path.write_text("41")
    with pytest.raises(CacheError, match=rf"{path.name} is foreign"):
        cached_answer({"x": 4}, [])
    assert path.read_text() == "41"


def test_a_damaged_key_is_deleted_with_its_result(path):
    """What the message advises is enough."""
    cached_answer({"x": 4}, [])
    key = path.with_name(f"{path.name}.key.json")
    key.write_text('{"x"')
    message = rf"{key.name} is truncated .* {path.name} was made for; move both"
    with pytest.raises(CacheError, match=message):
        cached_answer({"x": 4}, [])
    path.unlink()
    key.unlink()
    assert cached_answer({"x": 4}, []) == 40


def test_a_result_of_another_key_is_refused(path):
    """The stored key is compared with the key asked for, not only its hash."""
    cached_answer({"x": 4}, [])
    files.write_json(path.with_name(f"{path.name}.key.json"), {"x": 3})
    with pytest.raises(CacheError, match=r'found {"x":3}, expected {"x":4}'):
        cached_answer({"x": 4}, [])
