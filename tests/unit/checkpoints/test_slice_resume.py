"""Slicing that was interrupted goes on, or is refused."""

from pathlib import Path
from typing import Any

import pytest
from keeps import random_keep
from sliced_files import slice_files, sliced, source_of

from heapr_lab.checkpoints.slice_files import PROGRESS_NAME
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.folders import skeleton_of


class StopError(Exception):
    """What interrupts."""


def interrupted(model: Any, source: Path, out: Path) -> Path:
    """The first file in `out`, which was left in the second one."""
    first = sorted(path.name for path in source.glob("*.safetensors"))[0]

    def stop(*_counts: int) -> None:
        if (out / first).exists():
            raise StopError

    with pytest.raises(StopError):
        sliced(model, source, out, progress=stop)
    return out / first


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """A finished shard is not written again, and the end is the same."""
    model, source = source_of(tmp_path, max_shard_size="9KB")
    out = tmp_path / "out"
    first = interrupted(model, source, out)
    assert sorted(path.name for path in out.iterdir()) == [PROGRESS_NAME, first.name]
    modified = first.stat().st_mtime_ns
    sliced(model, source, out)
    assert first.stat().st_mtime_ns == modified
    sliced(model, source, tmp_path / "expected")
    names = sorted(path.name for path in out.iterdir())
    assert names == sorted(path.name for path in source.glob("model*"))
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_a_shard_cut_short_is_written_again(tmp_path: Path) -> None:
    """Its size tells."""
    model, source = source_of(tmp_path, max_shard_size="9KB")
    first = interrupted(model, source, tmp_path / "out")
    whole = first.read_bytes()
    first.write_bytes(whole[:-4])
    sliced(model, source, tmp_path / "out")
    assert first.read_bytes() == whole


def test_an_unfinished_folder_belongs_to_mask_and_source(tmp_path: Path) -> None:
    """Another mask, or a changed source, is refused."""
    model, source = source_of(tmp_path, max_shard_size="9KB")
    out, skeleton = tmp_path / "out", skeleton_of(model.config)
    interrupted(model, source, out)
    with pytest.raises(CacheError, match="of another mask: choose another folder"):
        slice_files(source, skeleton, random_keep(model, seed=1), out)
    file = next(source.glob("*.safetensors"))
    file.write_bytes(file.read_bytes())
    with pytest.raises(CacheError, match="of another source: choose another folder"):
        sliced(model, source, out)


def test_other_weights_in_the_folder_are_refused(tmp_path: Path) -> None:
    """They would be loaded with, or instead of, the sliced ones."""
    model, source = source_of(tmp_path)
    with pytest.raises(SpecError, match="is the source itself"):
        sliced(model, source, source)
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(CacheError, match=r"other weights \(model-00001-of-00002"):
        sliced(model, source, out)
