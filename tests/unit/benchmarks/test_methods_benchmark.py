"""benchmarks/methods.py: what is left to measure, and the rows of a tiny model."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from keeps import masked_nll, window_nll
from tiny_folder import write_text

from benchmarks import methods as script
from benchmarks.machine import Rows
from heapr_lab.workbench.settings import PROFILES


def test_a_run_resumes_where_it_was(tmp_path):
    """Ratios with rows are left out, also those that were refused; then the task."""
    rows, task = Rows("methods", tmp_path), script.Task("a", "reap", (0.2, 0.5))
    assert script.missing(task, rows) == task
    refused = script.labels(task, 0.5) | {"refused": "too much"}
    rows.add([refused], {})
    again = Rows("methods", tmp_path)
    assert script.missing(task, again) == script.Task("a", "reap", (0.2,))
    again.add([script.labels(task, 0.2) | {"refused": ""}], {})
    assert script.missing(task, Rows("methods", tmp_path)) is None
    other = script.Task("b", "reap", (0.2, 0.5))
    assert script.missing(other, again) == other


def test_rows_of_other_windows_are_not_mixed(tmp_path):
    """Those of another number of them, or of before they were spread; none is lost."""
    Rows("some", tmp_path).add([{"a": 1}], {"n_test": 4})
    Rows("some", tmp_path).add([{"a": 2}], {"n_test": 4})
    with pytest.raises(ValueError, match="rows of n_test 4, these are of 5"):
        Rows("some", tmp_path).add([{"a": 3}], {"n_test": 5})
    (tmp_path / "some.json").write_text('{"n_test": 4}')
    with pytest.raises(ValueError, match="rows of test_windows 'the first'"):
        Rows("some", tmp_path).add([{"a": 3}], {"n_test": 4})
    assert [row["a"] for row in Rows("some", tmp_path).rows] == [1, 2]


@pytest.fixture
def tiny(root, monkeypatch) -> str:
    """The tiny model, measured on one text with few windows and items."""
    text = str(write_text(root / "long.txt", n_texts=60))
    few = {"N_WINDOWS": 4, "PROFILE": PROFILES["small"]}
    for name, value in {**few, "CORPUS": text, "CORPORA": (text,)}.items():
        monkeypatch.setattr(script, name, value)
    for function in (script.opened, script.case_of, script.dense_predictions):
        function.cache_clear()
    return str(root / "moe")


def rows_of(model: str, method: str, *ratios: float) -> list[Any]:
    """What a task measures."""
    return script.measure(script.Task(model, method, ratios))


def test_the_rows_of_a_method_that_removes_atoms(tiny):
    """Losses are those of the mask; the fit at one ratio is timed."""
    rows = rows_of(tiny, "heapr", 0.4, 0.5)
    assert [row["variant"] for row in rows] == ["heapr"] * 2
    case = script.case_of(tiny)
    keep: Any = case.fitted(script.Task(tiny, "heapr"), 0.5, alone=False)
    ids = case.bench.test_windows(script.CORPUS).ids
    assert len(ids) == script.PROFILE.n_test
    dense = float(window_nll(case.model, ids).mean())
    masked = float(masked_nll(case.model, ids, keep.keep).mean())
    row = rows[1]
    assert row[f"nll {script.CORPUS}"] == pytest.approx(masked, abs=1e-6)
    assert row[f"delta_nll {script.CORPUS}"] == pytest.approx(masked - dense, abs=1e-6)
    assert 0 < row[f"agreement {script.CORPUS}"] < 1
    assert row["achieved_ratio"] == keep.achieved_ratio
    assert row["parameters_saved"] > 0
    assert row["routed_flops_saved"] > 0
    assert row[f"stderr {script.CORPUS}"] > 0
    assert "fit_seconds" not in row
    assert rows[0]["fit_seconds"] > 0


def test_a_refused_ratio_has_a_row_with_the_reason(tiny):
    """Two of four experts can go, not three."""
    rows = rows_of(tiny, "reap", 0.5, 0.75)
    assert [row["variant"] for row in rows] == ["reap"] * 2
    assert rows[0]["refused"] == ""
    assert rows[0]["routed_flops_saved"] == 0
    assert "nll" not in " ".join(rows[1])
    assert "the largest possible ratio is 0.5" in rows[1]["refused"]


def test_predictions_are_those_of_the_logits(bench):
    """Losses and most probable tokens, one window at a time."""
    ids = torch.arange(60).view(12, 5)
    losses, tops = script.predictions(bench.model, ids)
    assert losses.shape == tops.shape == (12, 4)
    for window, loss, top in zip(ids, losses, tops, strict=True):
        with torch.no_grad():
            log_p = bench.model(window[None]).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(-loss, log_p[range(4), window[1:]])
        assert torch.equal(top, log_p.argmax(-1))


def test_a_task_that_fails_does_not_stop_the_others(tiny, tmp_path, caplog):
    """It is logged and has no rows; those of the others are written."""
    rows = Rows("methods", tmp_path)
    broken = script.Task(str(tmp_path / "nothing"), "reap", (0.5,))
    with ThreadPoolExecutor(1) as pool:
        script.run([broken, script.Task(tiny, "reap", (0.5,))], rows, pool)
    assert caplog.text.count("it failed") == 1
    assert [row["model"] for row in Rows("methods", tmp_path).rows] == [f"{tiny} model"]
