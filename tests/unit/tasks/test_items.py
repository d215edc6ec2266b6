"""Accuracy item by item: which items, what is kept, and differences between states."""

import math
from typing import Any

import pandas as pd
import pytest
import torch
from heard import Heard, stop_at
from keeps import random_keep
from text_models import byte_model, task

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.pruning.surgery import masking
from heapr_lab.storage.cache import cache_path
from heapr_lab.storage.files import read_frame, write_frame
from heapr_lab.tasks import items as module
from heapr_lab.tasks.harness import run_tasks
from heapr_lab.tasks.items import cached_rows, drawn_items, task_items
from heapr_lab.tasks.paper_tasks import task_difference, task_summary

pytestmark = pytest.mark.usefixtures("cache")


# --- items ------------------------------------------------------------------------


def test_draws_are_nested():
    """They depend on the seed alone, and have each item once."""
    whole = drawn_items(500, seed=1)
    assert sorted(whole) == list(range(500))
    assert drawn_items(500, 40, seed=1) == whole[:40]
    assert drawn_items(500, 40, seed=2) != whole[:40]
    assert drawn_items(3, 40, seed=1) == drawn_items(3, seed=1)


def test_all_items_have_the_accuracies_of_run_tasks(tokenizer):
    """The standard errors are the same, too, whatever the order of the draw."""
    items = task_items(byte_model(), tokenizer, [task()], n_items=None)
    frame = run_tasks(byte_model(), tokenizer, [task()]).set_index("metric")
    for metric in ("acc", "acc_norm"):
        row = task_summary(items, metric=metric).iloc[0]
        assert row["value"] == pytest.approx(frame.loc[metric, "value"])
        assert row["stderr"] == pytest.approx(frame.loc[metric, "stderr"])
        assert row["n"] == 12
    assert list(items["item"]) == drawn_items(12, seed=0)


def test_items_are_answered_once(tokenizer, monkeypatch):
    """More items, a mask, and other weights: only what is new is computed."""
    runs: list[int] = []
    answered = module._Asked._answered
    monkeypatch.setattr(
        module._Asked,
        "_answered",
        lambda self, lm, items: [runs.append(len(items)), answered(self, lm, items)][1],
    )
    heard = Heard()
    dense = byte_model()
    few = task_items(dense, tokenizer, [task()], n_items=4)
    more = task_items(dense, tokenizer, [task()], n_items=9, progress=heard)
    assert runs == [4, 5]
    assert list(dict.fromkeys(heard)) == [(done, 9) for done in range(4, 10)]
    pd.testing.assert_frame_equal(more.head(4), few)
    with masking(dense, random_keep(dense)):
        masked = [task_items(dense, tokenizer, [task()], n_items=4) for _ in range(2)]
    assert runs == [4, 5, 4]
    pd.testing.assert_frame_equal(*masked)
    assert list(masked[0]["item"]) == list(few["item"])
    with torch.no_grad():
        dense.lm_head.weight.mul_(2)
    task_items(dense, tokenizer, [task()], n_items=4)
    assert runs == [4, 5, 4, 4]


def test_an_interrupt_keeps_earlier_items(tokenizer, monkeypatch):
    """It ends the work through the progress; the rest is computed afterwards."""
    monkeypatch.setattr(module, "_ITEMS_AT_ONCE", 5)
    dense = byte_model()
    with pytest.raises(KeyboardInterrupt):
        task_items(dense, tokenizer, [task()], progress=stop_at(6))
    heard = Heard()
    task_items(dense, tokenizer, [task()], progress=heard)
    assert list(dict.fromkeys(heard)) == [(done, 12) for done in range(5, 13)]


def test_answers_of_earlier_versions_are_read(tokenizer, cache):
    """Their files have a column more, which new answers do not have."""
    dense = byte_model()
    few = task_items(dense, tokenizer, [task()], n_items=4)
    (path,) = cache.rglob("*.parquet")
    rows, key = read_frame(path)
    write_frame(path, rows.assign(p_right=0.5), key)
    more = task_items(dense, tokenizer, [task()], n_items=9)
    pd.testing.assert_frame_equal(more.head(4), few)


def test_answers_that_are_not_stored_are_the_same(tokenizer):
    """They come in the order of the draw, and are given again each time."""
    dense, heard = byte_model(), Heard()
    options = {"n_items": 6, "progress": heard}
    frames = [
        task_items(dense, tokenizer, [task()] * 2, stored=stored, **options)
        for stored in (False, False, True)
    ]
    pd.testing.assert_frame_equal(frames[0], frames[1])
    pd.testing.assert_frame_equal(frames[0], frames[2])
    assert heard == sorted(heard[:48]) * 2 + heard[96:]
    assert (heard[0], heard[47]) == ((0, 12), (12, 12))


def test_refusals(tokenizer):
    """No tasks, and no items."""
    with pytest.raises(SpecError, match="no tasks given; for example openbookqa"):
        task_items(byte_model(), tokenizer, [])
    with pytest.raises(SpecError, match="n_items must be a whole number from 1"):
        task_items(byte_model(), tokenizer, [task()], n_items=0)


# --- rows -------------------------------------------------------------------------


def test_only_missing_rows_are_computed():
    """Their order is that of the numbers, some at a time; another key has its own."""
    asked: list[list[int]] = []
    heard = Heard()

    def squares(numbers: list[int]) -> pd.DataFrame:
        asked.append(numbers)
        back = numbers[::-1]
        return pd.DataFrame({"square": [float(n * n) for n in back]}, index=back)

    first = cached_rows("rows", {"of": "dense"}, [5, 2, 4], squares, at_once=2)
    assert first["square"].to_dict() == {5: 25.0, 2: 4.0, 4: 16.0}
    options: dict[str, Any] = {"at_once": 2, "progress": heard}
    more = cached_rows("rows", {"of": "dense"}, [9, 5, 1, 7], squares, **options)
    assert list(more.index) == [9, 5, 1, 7]
    assert asked == [[5, 2], [4], [9, 1], [7]]
    assert heard == [(1, 4), (3, 4), (4, 4)]
    cached_rows("rows", {"of": "pruned"}, [5], squares, at_once=2)
    assert asked[4:] == [[5]]


def test_rows_of_another_key_are_refused():
    """A file that was renamed, say."""
    path = cache_path("rows", {}, extension="parquet")
    write_frame(path, pd.DataFrame({"x": [1.0]}, index=[1]), {"of": "else"})
    with pytest.raises(CacheError, match="made for another key"):
        cached_rows("rows", {}, [1], pd.DataFrame, at_once=1)


# --- tables -----------------------------------------------------------------------

ITEMS = pd.DataFrame(
    {
        "task": ["a", "a", "a", "a", "b", "b"],
        "item": [3, 0, 1, 2, 7, 5],
        "acc": [1.0, 0.0, 1.0, 1.0, 0.0, 1.0],
        "acc_norm": [0.0, 0.0, 1.0, 1.0, math.nan, math.nan],
    }
)


def test_summary_by_hand():
    """Means and standard errors of each task, and of their mean."""
    rows = task_summary(ITEMS).set_index("task")
    assert rows["value"].to_dict() == {"a": 0.75, "b": 0.5, "mean": 0.625}
    assert rows["n"].to_dict() == {"a": 4, "b": 2, "mean": 6}
    assert rows.loc["a", "stderr"] == pytest.approx(0.25)  # sqrt(.25 / 4)
    assert rows.loc["b", "stderr"] == pytest.approx(0.5)
    assert rows.loc["mean", "stderr"] == pytest.approx(math.hypot(0.25, 0.5) / 2)
    norm = task_summary(ITEMS, metric="acc_norm").set_index("task")
    assert norm["value"].to_dict() == {"a": 0.5, "b": 0.5, "mean": 0.5}
    assert norm["metric"].tolist() == ["acc_norm", "acc", "acc_norm/acc"]
    with pytest.raises(SpecError, match=r"one of 'acc', 'acc_norm', .*got 'f1'"):
        task_summary(ITEMS, metric="f1")


def test_differences_are_paired_by_item():
    """Whatever the order of the rows; other items cannot be paired."""
    other = ITEMS.assign(acc=[1.0, 0.0, 0.0, 1.0, 0.0, 1.0]).iloc[::-1]
    rows = task_difference(ITEMS, other).set_index("task")
    assert rows["value"].to_dict() == {"a": 0.25, "b": 0.0, "mean": 0.125}
    assert rows.loc["a", "stderr"] == pytest.approx(0.25)  # of 1, 0, 0, 0
    assert rows.loc["b", "stderr"] == 0
    for others in (ITEMS.head(5), ITEMS.assign(item=[3, 0, 1, 4, 7, 5])):
        with pytest.raises(SpecError, match=r"6 and \d items cannot be paired"):
            task_difference(ITEMS, others)
