"""One writer for each output, which is whole or has no name; nothing is lost."""

import errno
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from keeps import random_keep
from safetensors import SafetensorError
from stored_tensors import tensors_in, written_at

from heapr_lab import prune, save_pruned
from heapr_lab.checkpoints import save
from heapr_lab.checkpoints.folder import check_new, new_folder, partial_of
from heapr_lab.checkpoints.save import MANIFEST_FILE, prune_folder
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.folders import read_weights
from heapr_lab.storage import files
from heapr_lab.streaming import on_disk

BUSY = "is being written by another process or thread: wait"
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def pruned(source, keep) -> Any:
    """The pruned model."""
    return prune(read_weights(source), keep)


@pytest.fixture(params=["streamed", "in memory"])
def write(request, source, keep, pruned) -> Callable[[Path], Path]:
    """Either way to write the pruned model to a folder, in several files."""
    if request.param == "streamed":
        return functools.partial(prune_folder, source, keep)
    return functools.partial(save_pruned, pruned, max_shard_size="12KB")


def files_in(folder: Path) -> dict[str, str]:
    """The hash of every file."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


# --- two writers ------------------------------------------------------------------


def test_a_second_writer_is_refused_at_once(write, source, tmp_path, monkeypatch):
    """Whatever its mask; the first one ends as if it were alone."""
    out, describe, refused = tmp_path / "out", save.describe, []
    other = random_keep(read_weights(source), seed=1)
    calls = write, functools.partial(prune_folder, source, other), check_new

    def meanwhile(*args: Any, **kwargs: Any) -> None:
        if not refused:
            for again in calls:
                with pytest.raises(SpecError, match=BUSY) as error:
                    again(out)
                refused.append(error)
        describe(*args, **kwargs)

    monkeypatch.setattr(save, "describe", meanwhile)
    write(out)
    assert len(refused) == len(calls)
    write(tmp_path / "alone")
    assert files_in(out) == files_in(tmp_path / "alone")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "alone"}
    with pytest.raises(SpecError, match="not empty"):
        write(out)
    assert files_in(out) == files_in(tmp_path / "alone")


def killed(work: Callable[..., Any], *args: Any, after: int) -> None:
    """Run `work(progress=...)` in a process that kills itself at a call of progress."""

    def die(*_counts: int) -> None:
        calls.append(None)
        if len(calls) > after:
            os.kill(os.getpid(), signal.SIGKILL)

    calls: list[None] = []
    process = FORK.Process(target=work, args=args, kwargs={"progress": die})
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_killed_pruning_of_a_folder_goes_on(after, source, keep, tmp_path):
    """Its lock ends with it; nobody finds half a folder, and the end is the same."""
    out = tmp_path / "out"
    killed(prune_folder, source, keep, out, after=after)
    assert not out.exists()
    stray = partial_of(out) / ".partial-0123-model-00002-of-00004.safetensors"
    stray.touch()  # which it was writing
    prune_folder(source, keep, out)
    prune_folder(source, keep, tmp_path / "alone")
    assert files_in(out) == files_in(tmp_path / "alone")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "alone"}


def test_a_finished_file_that_was_changed_is_written_again(source, keep, tmp_path):
    """Its size is right, as after a power cut: its hash tells."""
    out = tmp_path / "out"
    killed(prune_folder, source, keep, out, after=2)
    first = min(partial_of(out).glob("model-*"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-64] + bytes(64))
    prune_folder(source, keep, out)
    assert (out / first.name).read_bytes() == whole


def save_and_die(pruned: Any, out: Path, progress: Callable[..., None]) -> None:
    """A saving that is killed when the weights are written."""
    save.describe = lambda *_args, **_kwargs: progress()
    save_pruned(pruned, out)


def test_a_killed_saving_leaves_nothing_in_the_way(pruned, tmp_path):
    """What it left is cleared away by the next; a folder of another name is not."""
    out = tmp_path / "out"
    killed(save_and_die, pruned, out, after=0)
    (left,) = tmp_path.glob(".partial-*-out")
    other = tmp_path / ".partial-0123abcd-my-out"
    other.mkdir()
    save_pruned(pruned, out)
    assert not left.exists()
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"}
    assert names == {"out", other.name}


# --- what the disk does -----------------------------------------------------------


def test_a_changed_file_is_found_after_the_renaming(write, tmp_path, monkeypatch):
    """One byte differs, in weights whose hash the manifest has."""
    share = files.share_mode

    def spoil(folder: Path, like: Path) -> None:
        share(folder, like)
        file = min(folder.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"\x7f")

    monkeypatch.setattr(files, "share_mode", spoil)
    with pytest.raises(CacheError, match=r"model-00001.* is not what was written"):
        write(tmp_path / "out")


def test_the_manifest_has_the_hash_of_every_file(write, tmp_path):
    """Sizes are there too: what a reader needs to check a copy.

    Nothing is said of layers that predict further tokens where there are none.
    """
    out = write(tmp_path / "out")
    manifest = json.loads((out / MANIFEST_FILE).read_text())
    hashes = {n: h for n, h in files_in(out).items() if n.endswith(".safetensors")}
    assert len(hashes) > 1
    assert manifest["sha256"] == hashes
    assert manifest["files"] == {n: (out / n).stat().st_size for n in hashes}
    assert not {"kept", "dropped"} & manifest.keys()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_files_have_the_permissions_that_new_files_have(umask, write, tmp_path):
    """The weights too, which safetensors' writer keeps to their owner."""
    before = os.umask(umask)
    try:
        out = write(tmp_path / "out")
    finally:
        os.umask(before)
    assert [*out.glob("*.safetensors")]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
    assert modes == {0o666 & ~umask}


def test_a_full_disk_while_pruning_a_folder(source, keep, tmp_path, monkeypatch):
    """What is finished stays, for the same call to go on with."""
    error = OSError(errno.ENOSPC, "No space")
    full = Mock(wraps=on_disk.save_file, side_effect=[DEFAULT, DEFAULT, error])
    with monkeypatch.context() as patch:
        patch.setattr(on_disk, "save_file", full)
        with pytest.raises(SpecError, match="No space"):
            prune_folder(source, keep, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [".partial-out"]
    before = written_at(partial_of(tmp_path / "out"))
    assert before
    prune_folder(source, keep, tmp_path / "out")
    assert written_at(tmp_path / "out").items() > before.items()


def test_a_target_that_appears_meanwhile_is_left_alone(write, tmp_path, monkeypatch):
    """The finished checkpoint stays too, under the name that the message gives."""
    out, share = tmp_path / "out", files.share_mode

    def appear(folder: Path, like: Path) -> None:
        share(folder, like)
        out.mkdir()
        (out / "theirs").write_text("mine!")

    monkeypatch.setattr(files, "share_mode", appear)
    with pytest.raises(SpecError, match="appeared while it was written") as error:
        write(out)
    assert (out / "theirs").read_text() == "mine!"
    (partial,) = tmp_path.glob(".partial-*")
    assert str(partial) in str(error.value)
    assert read_weights(partial)


def test_odd_targets(pruned, tmp_path, monkeypatch):
    """A link leads to where the folder is made; below a file nothing can be made."""
    (tmp_path / "disk").mkdir()
    for name in ("there", "not_yet"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    (tmp_path / "disk" / "there").mkdir()
    for name in ("there", "not_yet"):
        save_pruned(pruned, tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert read_weights(tmp_path / "disk" / name)
    monkeypatch.chdir(tmp_path / "disk")
    save_pruned(pruned, Path("relative"))
    assert {p.name for p in Path.cwd().iterdir()} == {"there", "not_yet", "relative"}
    check_new(tmp_path / "disk" / "new")
    (tmp_path / "file").write_text("mine")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SpecError, match=r"not empty|nothing can be written"):
            save_pruned(pruned, wrong)
    assert (tmp_path / "file").read_text() == "mine"


def test_saving_into_the_folder_it_was_loaded_from(pruned, tmp_path):
    """In transformers' own way, which leaves the weights whole."""
    out = save_pruned(pruned, tmp_path / "out")
    before = tensors_in(out)
    read_weights(out).save_pretrained(out)
    torch.testing.assert_close(tensors_in(out), before, rtol=0, atol=0)


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_full_disk_while_saving(error, tmp_path):
    """It is one line, and nothing is left behind."""

    def fail() -> None:
        with new_folder(tmp_path / "out") as partial:
            (partial / "model.safetensors").touch()
            raise error(errno.ENOSPC, "No space")

    with pytest.raises(SpecError, match=r"out could not be written: .*No space"):
        fail()
    assert list(tmp_path.iterdir()) == []
