"""Our model class of the harness beside the harness's own, on a tiny model."""

import os
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from tiny_folder import write_model

from benchmarks import tasks
from heapr_lab.tasks.paper_tasks import PAPER_TASKS


def test_other_answers_by_hand():
    """Three items: one differs by acc, one by acc_norm alone, one by neither."""
    words = ["a", "bb", "a", "bbbb", "a", "bb"]
    requests = [
        SimpleNamespace(doc_id=number // 2, args=("", word))
        for number, word in enumerate(words)
    ]
    expected = [(value, False) for value in (-1.0, -2.5, -1.0, -4.2, -1.0, -3.0)]
    answers = [(value, False) for value in (-1.0, -0.5, -1.0, -3.8, -1.1, -3.1)]
    assert tasks.other_answers(requests, expected, answers) == 2


@pytest.mark.skipif(
    not Path(os.environ.get("HEAPR_TASKS_DIR", "none")).is_dir(),
    reason="the tasks' items are not in $HEAPR_TASKS_DIR",
)
def test_a_row_for_each_task(tmp_path, monkeypatch):
    """One more row is for all of them; the answers are the same."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    folder = write_model(tmp_path / "model")
    options = ["--n-items", "1", "--out", str(tmp_path)]
    tasks.run(tasks.parsed(["--model", str(folder), *options]))
    rows = pd.read_csv(tmp_path / "tasks.csv")
    assert list(rows["task"]) == [*PAPER_TASKS, "all"]
    assert list(rows["items"]) == [1] * 7 + [7]
    assert (rows["difference [nats]"] < 1e-2).all()
    assert rows["other answers"].sum() == 0
    assert rows["tokens"].iloc[-1] == rows["tokens"][:-1].sum() > 1000
