"""The command that trains: what it passes on, and what it refuses before that."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.lab_model import __main__ as command
from benchmarks.lab_model.recipes import RECIPES


def invoke(*words: str) -> Any:
    """The result of the command."""
    return CliRunner().invoke(command.app, words, prog_name=command.PROGRAM)


def test_a_recipe_is_trained_and_described(tmp_path, monkeypatch):
    """Every run has the seed added to its own; the facts are of all runs."""
    asked: list[Any] = []

    def train_bundled(out: Path, **options: Any) -> None:
        asked.extend((out, options["work"], [run.seed for run in options["runs"]]))
        options["on_step"](1, 1, 2.5)

    monkeypatch.setattr(command.train, "train_bundled", train_bundled)
    monkeypatch.setattr(
        command.card,
        "write_card",
        lambda *_, recipe, title: asked.extend((recipe, title)),
    )
    monkeypatch.setattr(command.paths, "cache_dir", lambda: tmp_path)
    done = invoke("--recipe", "upcycled", "--seed", "5", "--out", "new", "--json")
    work = tmp_path / "lab_training-upcycled"
    title = "The upcycled lab model"
    assert asked == [Path("new"), work, [5, 6], "upcycled", title]
    facts = json.loads(done.stdout)
    assert facts["steps"] == sum(run.n_steps for run in RECIPES["upcycled"])
    assert facts["last_batch_loss_nats"] == 2.5


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--recipe", "magic"), "heapr-lab: recipe 'magic': expected one of bundled,"),
        (("--recipe", "smolmoe", "--steps", "5"), "neither --steps"),
        (("--recipe", "smolmoe", "--start-from", "."), "nor --start-from"),
        (("--recipe", "smolmoe", "--device", "cuda"), "--device cpu"),
        (("--out", "file"), "heapr-lab: file is not a folder: give"),
        (("--work", "file"), "heapr-lab: file is not a folder: give"),
        (("--steps", "0"), "--steps"),
        (("--start-from", "."), "--start-from needs --steps"),
        (("--device", "cuda:99", "--work", "w", "--out", "o"), "give one of"),
    ],
)
def test_what_is_wrong_is_said_first(words, part, tmp_path, monkeypatch):
    """In one line, unless it is the parser that says it; no file is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    done = invoke(*words)
    assert done.exit_code == 2, done.exception
    assert part in done.stderr
    assert done.stderr.startswith("Usage: ") or done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
