"""Errors of the system, Control-C and readers that leave: one line, or none."""

import errno
import os
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
from commands import invoke, one_line, text_of
from safetensors import SafetensorError


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let models be loaded with this error."""
    opening = "heapr_lab.workbench.workbench.open_workbench"
    monkeypatch.setattr(opening, Mock(side_effect=error))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "Full", "/there"), "Full: /there: correct this and"),
        (SafetensorError("I/O error: (os error 28)"), "No space left on device: "),
        (MemoryError(), "--seq-len"),
    ],
)
def test_what_the_system_refuses_is_one_line(folder, monkeypatch, error, message):
    """What it says, and what to do about it."""
    fail(monkeypatch, error)
    assert message in one_line("score", folder / "moe", *text_of(folder))


def test_a_mistake_of_ours_is_not_hidden(folder, monkeypatch):
    """Only what a user can mend is one line."""
    fail(monkeypatch, ZeroDivisionError())
    result = invoke("score", folder / "moe", *text_of(folder))
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("command", [("score",), ("prune", "--ratio", 0.3)])
def test_control_c_is_one_line(folder, monkeypatch, command):
    """Exit status 130, and how to go on."""
    fail(monkeypatch, KeyboardInterrupt())
    result = invoke(*command, folder / "moe", *text_of(folder))
    assert result.exit_code == 130
    assert re.fullmatch(
        "heapr-lab: interrupted; .*the same command continues from .*\n", result.stderr
    )


def test_a_reader_that_leaves_is_no_error(folder):
    """`heapr-lab … | true` writes nothing on standard error."""
    args = ["provenance", str(folder / "table.parquet")]
    command = [sys.executable, "-m", "heapr_lab", *args]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.stderr == b""
