"""`heapr-lab grid`: count, run one task or all, merge."""

import json
from pathlib import Path

import pandas as pd
import pytest
from commands import one_line, run

from heapr_lab.experiments import grid as grids


@pytest.fixture
def spec(root: Path, tmp_path: Path) -> Path:
    """The file of two tasks."""
    path = tmp_path / "runs.toml"
    path.write_text(
        f"""
        models = ["{root / "moe"}"]
        methods = ["paper"]
        ratios = [0.25, 0.5]
        corpora = ["{root / "text.txt"}"]
        profile = "small"
        seq_len = 32
        """
    )
    return path


def test_tasks_run_one_by_one_and_are_merged(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an array of SLURM: the number is that of the job, unless one is given."""
    assert run("grid", spec, "--count") == "2\n"
    assert json.loads(run("grid", spec, "--count", "--json")) == {"tasks": 2}
    assert "run the tasks first" in one_line("grid", spec, "--merge")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert run("grid", spec, "--count") == "2\n"
    assert json.loads(run("grid", spec, "--json"))["missing"] == 1

    message = one_line("grid", spec, "--merge")
    assert "runs.csv has 1 of 2 rows, missing: task 0 (" in message
    assert "task 1" not in message
    assert pd.read_csv(spec.with_suffix(".csv"))["ratio"].tolist() == [0.5]

    assert json.loads(run("grid", spec, "--task", 0, "--json"))["missing"] == 0
    out = spec.with_name("all.parquet")
    assert json.loads(run("grid", spec, "--merge", "--out", out, "--json")) == {
        "out": str(out),
        "tasks": 2,
    }
    assert pd.read_parquet(out)["ratio"].tolist() == [0.25, 0.5]


def test_all_tasks_run_here(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is named."""
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    assert "missing                      0" in run("grid", spec)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--count", "--merge"), "--count and --merge are given"),
        (("--task", "2"), "there is no task 2: expected 0 to 1"),
    ],
)
def test_what_is_refused(
    spec: Path,
    options: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything runs."""
    monkeypatch.setattr(grids, "_bench_of", lambda *_given: 1 / 0)
    assert said in one_line("grid", spec, *options)


def test_a_table_of_another_kind_is_refused(spec: Path) -> None:
    """Only .csv and .parquet are written."""
    message = one_line("grid", spec, "--merge", "--out", spec.with_suffix(".xlsx"))
    assert ".csv" in message
