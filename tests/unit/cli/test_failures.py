"""Errors of the system, Control-C and readers that leave: one line, or none."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from commands import invoke, one_line, text_of
from safetensors import SafetensorError

from heapr_lab.storage import files

OPEN = "heapr_lab.workbench.workbench.open_workbench"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "choose another place"),
        (errno.EACCES, "choose another place"),
        (errno.EIO, "correct this"),
    ],
)
def test_a_system_that_refuses_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    number: int, remedy: str,
) -> None:  # fmt: skip
    """A full disk, a cache that cannot be written: said as the system says it."""

    def fail(*_args: Any, **_options: Any) -> NoReturn:
        raise OSError(number, os.strerror(number), str(tmp_path / "there"))

    monkeypatch.setattr(files.pq, "write_table", fail)
    out = tmp_path / "table.parquet"
    args = ("score", folder / "moe", "--seed", number, *text_of(folder))
    message = one_line(*args, "--out", out)
    assert f"{os.strerror(number)}: {tmp_path / 'there'}" in message
    assert remedy in message
    assert "$HEAPR_CACHE_DIR" in message
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_under_safetensors_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has an error of its own, with the number of the system's in its text."""

    def fail(*_args: Any, **_options: Any) -> NoReturn:
        raise SafetensorError("Error: I/O error: No space left (os error 28)")

    monkeypatch.setattr(OPEN, fail)
    message = one_line("score", folder / "moe", *text_of(folder))
    assert message.startswith(f"heapr-lab: {os.strerror(errno.ENOSPC)}: free some")


def test_no_memory_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says what takes less memory."""

    def fail(*_args: Any, **_options: Any) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(OPEN, fail)
    assert "--seq-len" in one_line("score", folder / "moe", *text_of(folder))


def test_a_mistake_of_ours_is_not_hidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what a user can mend is one line."""
    monkeypatch.setattr(OPEN, lambda *_args, **_options: 1 / 0)
    result = invoke("score", folder / "moe", *text_of(folder))
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C is pressed when the model is about to be loaded."""

    def interrupt(*_args: Any, **_options: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(OPEN, interrupt)


@pytest.mark.usefixtures("interrupting")
@pytest.mark.parametrize("command", ["score", "prune"])
def test_control_c_is_one_line(folder: Path, command: str) -> None:
    """Exit status 130, and how to go on."""
    ratio = ("--ratio", 0.3) if command == "prune" else ()
    result = invoke(command, folder / "moe", *ratio, *text_of(folder))
    assert result.exit_code == 130
    assert re.fullmatch(
        "heapr-lab: interrupted; .*the same command continues from .*\n", result.stderr
    )


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    """`heapr-lab … | true` writes nothing on standard error."""
    args = ["provenance", str(folder / "table.parquet")]
    command = [sys.executable, "-m", "heapr_lab", *args]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.stderr == b""
