"""The folders of the project, and what is kept under the hash of a key."""

from pathlib import Path

import pytest

from heapr_lab.storage import cache, paths
from heapr_lab.storage.hashing import digest


def test_a_cache_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tilde is the user's home; an empty setting is none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HEAPR_CACHE_DIR", "~/mine")
    assert paths.cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("HEAPR_CACHE_DIR", "")
    assert paths.cache_dir() == tmp_path / ".cache" / "heapr_lab"


def test_a_result_lies_under_the_hash_of_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kind, then sixteen digits: the names that earlier results have."""
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path))
    path = cache.cache_path("kind", {"x": 1}, extension="json")
    assert path == tmp_path / "kind" / f"{digest({'x': 1})[:16]}.json"
    assert path.name == "5041bf1f713df204.json"
