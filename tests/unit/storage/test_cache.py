"""Files are whole or absent, what is foreign is refused, and results are made once."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage import cache as store
from heapr_lab.storage import files, paths
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


@pytest.mark.parametrize("index", [pd.RangeIndex(3), pd.Index([7, 3, 5], name="row")])
def test_frame_round_trip_keeps_values_types_and_metadata(tmp_path, index):
    """What is read is what was written, columns chosen or not, and can be changed.

    An index that is not a plain range comes back, too. The path may be a text.
    """
    path, written = str(tmp_path / "deep" / "x.parquet"), FRAME.set_index(index)
    files.write_frame(path, written, {"N": 3, "spec": {"dtype": "float32"}})
    frame, metadata = files.read_frame(path)
    pd.testing.assert_frame_equal(frame, written)
    assert metadata == {"N": 3, "spec": {"dtype": "float32"}}
    assert files.read_metadata(path) == metadata
    some, _ = files.read_frame(path, ["sum_h2"])
    pd.testing.assert_frame_equal(some, written[["sum_h2"]])
    some.iloc[0] = 9.0
    assert some["sum_h2"].tolist() == [9.0, -1.25, 3.0]


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


# --- JSON and states ------------------------------------------------------------


def test_state_round_trip(tmp_path):
    """Arrays of any layout and shape come back exactly, with the meta."""
    arrays = {
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    path = str(tmp_path / "s.safetensors")
    files.save_state(path, arrays, {"batch": 3})
    loaded, meta = files.load_state(path)
    assert meta == {"batch": 3}
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)


# --- cached results -------------------------------------------------------------


@pytest.fixture
def path(cache) -> Path:
    """The file of the answer to {"x": 4}."""
    return store.cache_path("answers", {"x": 4}, extension="json")


def test_a_result_is_computed_once_per_key(path):
    """The second asking reads; another key computes; the key is readable beside."""
    compute = Mock(side_effect=[40, 50])
    answers = [store.cached_json("answers", {"x": x}, compute) for x in (4, 4, 5)]
    assert answers == [40, 40, 50]
    assert files.read_json(path) == 40
    assert files.read_json(path.with_name(f"{path.name}.key.json")) == {"x": 4}


@pytest.mark.parametrize(
    ("result", "key", "message"),
    [
        ('{"val', '{"x": 4}', "NAME is truncated"),
        ("41", None, "NAME is foreign"),
        ("41", '{"x"', r"NAME\.key\.json is truncated .* NAME was made for; move both"),
        ("41", '{"x": 3}', 'NAME was .* found {"x":3}, expected {"x":4}'),
    ],
)
def test_a_result_that_is_not_ours_is_refused(path, result, key, message):
    """It is damaged, or nobody knows what for; it is never computed over.

    What the message advises, to delete the result and its key, is enough.
    """
    path.parent.mkdir(parents=True)
    path.write_text(result)
    if key is not None:
        path.with_name(f"{path.name}.key.json").write_text(key)
    compute = Mock(return_value=40)
    with pytest.raises(CacheError, match=message.replace("NAME", path.name)):
        store.cached_json("answers", {"x": 4}, compute)
    compute.assert_not_called()
    assert path.read_text() == result
    for left in path.parent.iterdir():
        left.unlink()
    assert store.cached_json("answers", {"x": 4}, compute) == 40
