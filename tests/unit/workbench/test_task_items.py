"""The paper's tasks in a workbench: the same drawn items for every mask."""

import pytest
from keeps import random_keep
from tiny_folder import write_model, write_piqa

from heapr_lab import Workbench, masking, open_workbench
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.tasks.items import drawn_items, task_items
from heapr_lab.tasks.paper_tasks import task_difference, task_summary
from heapr_lab.workbench.settings import CONTINUATION, PROFILES

N_ITEMS = 60


@pytest.fixture
def bench(cache, tmp_path, monkeypatch) -> Workbench:
    """A workbench of a tiny model, with items of PIQA."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HEAPR_TASKS_DIR", str(tmp_path / "tasks"))
    write_piqa(tmp_path / "tasks" / "piqa", N_ITEMS)
    folder = write_model(tmp_path / "moe")
    return open_workbench(str(folder), profile="small", dtype="float32")


def test_states_are_compared_on_the_same_drawn_items(bench):
    """As many as the profile has, not the first; the error is that of the pairs."""
    model, tokenizer = bench.model, bench.tokenizer
    keep = random_keep(model)
    dense, pruned = (bench.task_accuracy(mask, "piqa") for mask in (None, keep))
    frames = [task_items(model, tokenizer, ["piqa"], n_items=50)]
    with masking(model, keep):
        frames.append(task_items(model, tokenizer, ["piqa"], n_items=50))
    assert list(frames[1]["item"]) == drawn_items(N_ITEMS, 50, seed=0)
    for row, frame in zip((dense, pruned), frames, strict=True):
        assert row["items"] == frame["acc"].tolist()
        summary = task_summary(frame).iloc[0]
        assert [row["value"], row["stderr"]] == [summary["value"], summary["stderr"]]
        assert row["n"] == 50
    paired = paired_difference(pruned["items"], dense["items"])
    expected = task_difference(frames[1], frames[0]).iloc[0]
    assert paired == pytest.approx((expected["value"], expected["stderr"]))
    assert paired[1] > 0


def test_a_limit_is_that_of_drawn_items(bench):
    """More of them begin with the same; both metrics of the task are there."""
    few, more = (bench.task_results(None, "piqa", limit=n) for n in (7, 11))
    for metric, row, longer in zip(("acc", "acc_norm"), few, more, strict=True):
        assert (row["metric"], row["n"], longer["n"]) == (metric, 7, 11)
        assert longer["items"][:7] == row["items"]
    assert bench.run_task("piqa", limit=7) == few
    assert len(bench.task_results(None, "piqa")[0]["items"]) == N_ITEMS


def test_the_continuation_task_has_a_number_of_its_own():
    """It is the profile's, as before; each other task has at least 50 items."""
    profile = PROFILES["pretrained"]
    assert profile.items_of(CONTINUATION) == profile.items_of("continuation:ptb") == 8
    assert {p.items_of("piqa") >= 50 for p in PROFILES.values()} == {True}
