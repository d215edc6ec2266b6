"""Reading ahead ends, and reads what it was asked to."""

import threading
import time
from pathlib import Path

import pytest

from heapr_lab.models import read_ahead
from heapr_lab.models.read_ahead import ReadAhead
from heapr_lab.models.safetensors_headers import StoredTensor
from heapr_lab.models.weights_on_disk import FoundTensor

N_BYTES = 1000


def tensor(path: Path, start: int, n_bytes: int) -> FoundTensor:
    """A tensor at this place in a file."""
    stored = StoredTensor("F32", (n_bytes // 4,), start, n_bytes)
    return FoundTensor(path, "x", stored, "x", None, 0)


def ended(before: set[threading.Thread]) -> bool:
    """Whether no thread is left that was started since, within ten seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if set(threading.enumerate()) <= before:
            return True
        time.sleep(0.01)
    return False


def n_bytes_read() -> int:
    """Of this process, from any file."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.parametrize("at_once", [7, 64, 10**6])
def test_every_byte_is_read_once(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the tensors alone, in reads of any size."""
    if not Path("/proc/self/io").exists():
        pytest.skip("the system does not count what a process reads")
    monkeypatch.setattr(read_ahead, "_AT_ONCE", at_once)
    path = tmp_path / "large"
    path.write_bytes(bytes(1000 * N_BYTES))
    tensors = [tensor(path, 8, 400 * N_BYTES), tensor(path, 500 * N_BYTES, N_BYTES)]
    threads, before = set(threading.enumerate()), n_bytes_read()
    ReadAhead().begin(tensors)
    assert ended(threads)
    # Looking at the counter is reading, too.
    assert 0 <= n_bytes_read() - before - 401 * N_BYTES < 20 * N_BYTES


def test_files_that_are_shorter_or_gone(tmp_path: Path) -> None:
    """They are an error of who reads the weights, not of who reads ahead."""
    path, before = tmp_path / "short", set(threading.enumerate())
    path.write_bytes(bytes(N_BYTES))
    ahead = ReadAhead()
    ahead.begin([tensor(path, 0, 10 * N_BYTES), tensor(path, 0, N_BYTES)])
    assert ended(before)
    ahead.begin([tensor(tmp_path / "gone", 0, N_BYTES)])
    assert ended(before)
    ahead.begin([])
    assert set(threading.enumerate()) == before
