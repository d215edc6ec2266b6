"""What is kept of a streamed model: in memory up to a budget, in files beyond it.

Groups of tensors have names, such as the states that a batch leaves a layer with. In a
durable store every group is a file as well, so that another process finds what an
earlier one finished. A file is written under a temporary name and renamed.
"""

import contextlib
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage import files
from heapr_lab.storage.cache import lock
from heapr_lab.storage.paths import cache_dir, writable
from heapr_lab.streaming.stream import Stream, stream_of

logger = logging.getLogger(__name__)

_KEY, _GROUP = "key.json", "group"
_HELD = "held.lock"
"""A file in a temporary folder, locked as long as its process is there."""
_SHARE_OF_FREE = 0.5
"""The share of free memory to use if no budget is given."""
_SHARE_OF_DISK = 0.9
_LARGER_DISK = "set $HEAPR_CACHE_DIR to a larger disk"

Group = dict[str, torch.Tensor]


def budget_of(stream: Stream) -> int:
    """Bytes that are kept of a streamed model in memory."""
    if stream.host_memory is not None:
        return stream.host_memory
    return int(_SHARE_OF_FREE * psutil.virtual_memory().available)


class SweepStore:
    """Groups of tensors on the CPU, by name."""

    def __init__(self, folder: Path, *, budget: int, durable: bool) -> None:
        """Nothing is written yet.

        Args:
            folder: for files; it exists.
            budget: bytes of groups that are in memory; others are read when they are
                asked for.
            durable: whether groups in memory are written to files as well.
        """
        self.folder, self._section = folder, ""
        self._room, self._durable = budget, durable
        self._memory: dict[str, Group] = {}

    def begin(self, section: str) -> None:
        """From here on, names are those in a section."""
        self._section = section

    def __contains__(self, name: str) -> bool:
        path = self._path(name)
        return path.stem in self._memory or path.exists()

    def put(self, name: str, group: Group) -> None:
        """Keep a group.

        Raises:
            SpecError: it cannot be written.
        """
        tensors = {k: t.detach().cpu().contiguous() for k, t in group.items()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        self._forget(self._path(name).stem)
        fits = size <= self._room
        if fits:
            self._room -= size
            self._memory[self._path(name).stem] = tensors
        if self._durable or not fits:
            self._write(name, tensors)

    def get(self, name: str) -> Group:
        """A group that was kept.

        Raises:
            CacheError: its file is missing or damaged.
        """
        path = self._path(name)
        group = self._memory.get(path.stem)
        return self._read(path) if group is None else group

    def drop(self, prefix: str) -> None:
        """Forget every group whose name begins with `prefix`."""
        start = self._path(prefix).stem
        for name in [name for name in self._memory if name.startswith(start)]:
            self._forget(name)
        for path in self.folder.glob(f"{start}*.safetensors"):
            path.unlink()

    @property
    def room(self) -> tuple[int, int]:
        """Bytes that there is room for in memory alone, and in files."""
        free = int(_SHARE_OF_DISK * shutil.disk_usage(self.folder).free)
        return 0 if self._durable else self._room, free

    def check_room(
        self, n_bytes: int, *, what: str, remedy: str = _LARGER_DISK
    ) -> None:
        """Check that there is room for what will be put.

        Args:
            n_bytes: its size.
            what: for the message: a plural noun with its article.
            remedy: for the message: what helps other than more room here.

        Raises:
            SpecError: there is not.
        """
        memory, disk = self.room
        if n_bytes > memory + disk:
            raise SpecError(
                f"{what} need {n_bytes / 1e9:.3g} GB; there are {memory / 1e9:.3g} GB "
                f"of host memory for them and {disk / 1e9:.3g} GB on the disk of "
                f"{self.folder}: free some, raise host_memory, or {remedy}"
            )

    def _forget(self, stem: str) -> None:
        """Drop a group from memory, if it is there."""
        self._room += sum(t.nbytes for t in self._memory.pop(stem, {}).values())

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._section}-{name}.safetensors"

    def _write(self, name: str, group: dict[str, torch.Tensor]) -> None:
        with files.replacing(self._path(name)) as temporary:
            about = files.sealed(_values(group), {_GROUP: self._path(name).stem})
            save_file(group, temporary, metadata=about)

    def _read(self, path: Path) -> Group:
        if not path.exists():
            raise CacheError(f"{path} is missing: delete {self.folder}, and run again")
        try:
            with files.readable(path), safe_open(path, framework="pt") as file:
                # Copies are aligned as what is in memory is: products depend on it.
                names = file.keys()
                group = {name: file.get_tensor(name).clone() for name in names}
                about = files.unsealed(file.metadata(), _values(group), path)
        except CacheError as error:
            raise CacheError(
                f"{path} is damaged: delete {self.folder}, and run again"
            ) from error
        if about.get(_GROUP) != path.stem:
            raise CacheError(
                f"{path} has the contents of {about.get(_GROUP)}: delete "
                f"{self.folder}, and run again"
            )
        return group


def _values(group: Group) -> dict[str, np.ndarray]:
    """Names, types and shapes of tensors, with their bytes."""
    return {
        f"{name} {tensor.dtype} {tuple(tensor.shape)}": tensor.reshape(-1)
        .view(torch.uint8)
        .numpy()
        for name, tensor in group.items()
    }


def temporary(budget: int) -> SweepStore:
    """A store whose files are removed with it, and when the process ends.

    Those of processes that were killed before are removed here.
    """
    parent = cache_dir() / "sweeps"
    with writable(parent):
        parent.mkdir(parents=True, exist_ok=True)
        with lock(parent):
            _remove_abandoned(parent)
            folder = Path(tempfile.mkdtemp(dir=parent))
            held = filelock.FileLock(folder / _HELD)
            held.acquire()
    store = SweepStore(folder, budget=budget, durable=False)
    weakref.finalize(store, _remove, folder, held)
    return store


def _remove(folder: Path, _held: filelock.BaseFileLock) -> None:
    """Remove a temporary folder, whose lock lasts until then."""
    shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders whose locks ended with their processes."""
    for held in parent.glob(f"*/{_HELD}"):
        with (
            contextlib.suppress(filelock.Timeout, OSError),
            filelock.FileLock(held, timeout=0),
        ):
            shutil.rmtree(held.parent)


def store_beside(model: nn.Module) -> SweepStore | None:
    """A temporary store with the budget of a streamed model; None for another."""
    stream = stream_of(model)
    return None if stream is None else temporary(budget_of(stream))


@contextlib.contextmanager
def opened(
    state: Path | None, key: Mapping[str, Any], *, budget: int
) -> Iterator[SweepStore]:
    """A store; with `state`, one that continues what an interrupted pass had kept.

    Args:
        state: a folder, which stays if the block raises and is removed otherwise;
            without it files are temporary.
        key: plain data: `pass` has to be that of the earlier pass; if anything else
            differs, the pass begins again.
        budget: as of `SweepStore`.

    Raises:
        CacheError: the folder belongs to another pass.
    """
    if state is None:
        store = temporary(budget)
        try:
            yield store
        finally:
            shutil.rmtree(store.folder)
        return
    yield durable(state, key, budget=budget)
    shutil.rmtree(state)


def durable(folder: Path, key: Mapping[str, Any], *, budget: int) -> SweepStore:
    """A store in `folder`, empty unless it was that of `key` before.

    Arguments are as of `opened`.

    Raises:
        CacheError: it belongs to another pass.
    """
    there = (folder / _KEY).exists()
    old_key = files.read_object(folder / _KEY) if there else {}
    if there and old_key.get("pass") != key["pass"]:
        raise CacheError(
            f"{folder} is the state of another pass (another model or calibration "
            "set); delete it, or give another file"
        )
    if old_key != dict(key):
        shutil.rmtree(folder, ignore_errors=True)
        files.write_json(folder / _KEY, dict(key))
    else:
        for partial in folder.glob(".partial-*"):
            partial.unlink()
        logger.info("resumed %s", folder)
    return SweepStore(folder, budget=budget, durable=True)
