"""The command line, called in this process on tiny models."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from heapr_lab.cli.app import app

TINY = ("--profile", "small", "--seq-len", "32")


def text_of(root: Path) -> tuple[str, ...]:
    """The options that calibrate on little of the text."""
    return ("--corpus", str(root / "text.txt"), *TINY)


def invoke(*arguments: object) -> Any:
    """The result of the command line."""
    return CliRunner().invoke(app, [str(part) for part in arguments])


def run(*arguments: object) -> str:
    """The output of a command that has to succeed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def said(*arguments: object) -> dict[str, Any]:
    """What a command says as JSON."""
    return dict(json.loads(run(*arguments, "--json")))


def manifest_of(folder: Path) -> dict[str, Any]:
    """What the manifest of a checkpoint says."""
    return dict(json.loads((folder / "heapr_manifest.json").read_text()))


def refused(*arguments: object) -> str:
    """The message of a command that has to be refused without a traceback."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == "", result.stdout
    assert "Traceback" not in result.stderr
    bar = "Loading weights"  # how that of transformers begins
    lines = result.stderr.splitlines()
    return "\n".join(line for line in lines if line and not line.startswith(bar))


def one_line(*arguments: object) -> str:
    """The one line of a command that has to be refused."""
    message = refused(*arguments)
    assert message.startswith("heapr-lab: ")
    assert "\n" not in message
    return message
