"""What errors look like in a notebook."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output


@pytest.fixture
def shell(monkeypatch) -> InteractiveShell:
    """A shell without colours, where no hub is asked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shell = InteractiveShell(colors="nocolor")
    shell.history_manager.enabled = False
    return shell


def test_an_error_is_one_line_in_a_notebook(shell):
    """What was asked for and a remedy; the traceback is there for who asks for it."""
    with capture_output() as shown:
        result = shell.run_cell("import heapr_lab\nheapr_lab.explore('no/such-model')")
    assert not result.success
    (line,) = shown.stdout.strip().splitlines()
    assert line.startswith("SpecError: cannot get the files of the model 'no/such")
    assert "Expected a hub id that can be reached, a local folder" in line
    assert "Traceback" not in shown.stdout + shown.stderr
    with capture_output() as shown:
        shell.run_cell("%tb")
    assert "Traceback (most recent call last)" in shown.stdout
    assert "check_there" in shown.stdout
