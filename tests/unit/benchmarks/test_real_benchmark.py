"""The table of pretrained models goes on where it was, and pairs what is the same."""

import argparse
import contextlib
import itertools
import math

import pandas as pd
import pytest
import torch
from families import tiny_model, tiny_windows
from heard import Heard, stop_at
from keeps import random_keep

from benchmarks import real
from benchmarks.real import CORPORA, Results, State
from heapr_lab import Selection, evaluate_perplexity, masking, select
from heapr_lab.methods.collectors import Measurements
from heapr_lab.pruning.savings import savings_of
from heapr_lab.tasks.paper_tasks import PAPER_TASKS
from heapr_lab.text.calibration_spec import spread

_DENSE = State("tiny", "abc")
_HEAPR = State("tiny", "abc", "heapr", 0.25)
_OTHER = State("tiny", "abc", "random", 0.25)


def _results(
    nll: float, right: int, *, n_windows: int = 3, n_items: int = 4
) -> Results:
    places = itertools.product(CORPORA, range(n_windows))
    windows = pd.DataFrame(places, columns=["corpus", "window"])
    windows["nll"] = nll + windows["window"]
    places = itertools.product(PAPER_TASKS, range(n_items))
    items = pd.DataFrame(places, columns=["task", "item"])
    answers = items["item"].lt(right).astype(float)
    items = items.assign(acc=answers, acc_norm=answers)
    sizes = {"achieved_ratio": 0.25, "parameters_saved": 0.1, "spread": n_windows}
    return Results(windows, items, sizes)


def _found() -> dict[State, Results]:
    return {
        _DENSE: _results(1.0, 3),
        _HEAPR: _results(1.5, 2),
        _OTHER: _results(2.5, 1),
    }


def test_what_was_written_is_read_again(tmp_path):
    """Every state with its windows, items and sizes."""
    results = _found()
    real.write(results, tmp_path, seed=0)
    again = real.stored(tmp_path)
    assert list(again) == sorted(results, key=lambda state: [*map(str, vars(state))])
    for state, expected in results.items():
        pd.testing.assert_frame_equal(again[state].windows, expected.windows)
        pd.testing.assert_frame_equal(again[state].items, expected.items)
        assert again[state].sizes == expected.sizes


def test_differences_are_to_the_dense_model_and_to_heapr():
    """Losses are paired window by window, and answers item by item."""
    row = real.row_of(_OTHER, _found())
    assert row["delta_nll ptb"] == pytest.approx(1.5)
    assert row["delta_nll_stderr ptb"] == pytest.approx(0)
    assert row["accuracy"] == pytest.approx(1 / 4)
    assert row["against_dense"] == pytest.approx(-2 / 4)
    assert row["against_heapr"] == pytest.approx(-1 / 4)
    assert math.isnan(real.row_of(_HEAPR, _found())["against_heapr"])


def test_states_are_paired_on_the_items_and_windows_of_both():
    """By their places, not their order; the dense model may have been asked more."""
    results = _found() | {_DENSE: _results(1.0, 3, n_windows=5, n_items=9)}
    results[_HEAPR].windows[["window", "nll"]] += 2  # the later ones of the five
    row = real.row_of(_HEAPR, results)
    assert row["against_dense"] == pytest.approx(-1 / 4)
    assert row["delta_nll c4"] == pytest.approx(0.5)
    assert row["items"] == 4


@pytest.mark.parametrize(
    ("windows", "items", "expected"),
    [(16, 4, True), (48, 4, True), (0, 4, False), (48, 5, False)],
)
def test_a_state_is_measured_again_if_it_lacks_what_is_asked_for(
    windows, items, expected
):
    """More windows or items; 0 windows are all that there are."""
    options = argparse.Namespace(windows=windows, items=items)
    results = _results(1.0, 3, n_windows=48)
    assert results.suffices(options) is expected
    results.sizes["spread"] = 0
    assert results.suffices(options) is (items <= 4)


def test_what_is_committed_is_not_measured_again():
    """Its states are those of today's script, also where a model is made anew."""
    listed = itertools.chain(*map(real.states, ("smolmoe", "smollm2")))
    assert {*real.stored(real.RESULTS)} <= {*listed}


def test_only_what_is_missing_is_measured(monkeypatch):
    """Where more windows are asked for, the items of before stay, and the reverse."""
    before, others = (
        _results(1.0, 3, n_windows=16),
        _results(2.0, 1, n_windows=48, n_items=9),
    )
    monkeypatch.setattr(real, "window_losses", lambda *_: others.windows)
    monkeypatch.setattr(real, "task_items", lambda *_, **__: others.items)
    monkeypatch.setattr(real, "input_device", torch.device)
    for windows, items in ((48, 4), (16, 9)):
        options = argparse.Namespace(windows=windows, items=items, seed=0)
        read = real.read("cpu", None, options, {}, before)
        assert read.windows is (others if windows == 48 else before).windows
        assert read.items is (others if items == 9 else before).items
        assert read.sizes["spread"] == windows


def test_sizes_are_those_of_the_mask():
    """FLOPs at the paper's context, where the routing of tokens was measured."""
    pruner = object.__new__(real.Pruner)
    pruner.model = tiny_model("qwen2_moe")
    measured = Measurements(pruner.model, tiny_windows())
    pruner._measured = {(real.FITTED_TO, 0): measured}
    for method in ("heapr", "fisher", "heapr-l"):
        scope = "layer" if method == "heapr-l" else "global"
        estimator = "fisher" if method == "fisher" else "heapr"
        selection = Selection(0.25, estimator=estimator, scope=scope)
        keep = select(measured.table(), selection)
        saved = savings_of(keep, measured.table(), seq_len=2048)
        _, sizes = pruner.pruned(State("smolmoe", "w", method, 0.25))
        assert sizes == {
            "achieved_ratio": keep.achieved_ratio,
            "parameters_saved": saved["parameter_reduction"],
            "flops_saved": saved["flops_reduction"],
        }
        assert 0 < sizes["flops_saved"] < 0.25
    _, sizes = pruner.pruned(State("smolmoe", "w", "reap", 0.25))
    assert math.isnan(sizes["flops_saved"])


def test_more_windows_are_some_more_windows(monkeypatch, capsys):
    """The 16 that states are compared on are among 48, and none of them among 32."""
    few, none, more = ({*spread(595, n)} for n in (16, 32, 48))
    assert few < more
    assert not few & none
    monkeypatch.setattr("sys.argv", ["real.py", "--windows", "32"])
    with pytest.raises(SystemExit):
        real.main()
    assert "choose from 16, 48, 0" in capsys.readouterr().err


def test_windows_are_measured_once(cache, monkeypatch):
    """Their losses are those of one pass; an interrupt keeps earlier windows."""
    monkeypatch.setattr(real, "TOKENS_AT_ONCE", 64)
    dense = tiny_model("qwen2_moe", dtype=torch.float32)
    ids = torch.randint(48, (7, 32), generator=torch.Generator().manual_seed(0))
    heard = Heard()
    for mask in (contextlib.nullcontext(), masking(dense, random_keep(dense))):
        with mask:
            whole = evaluate_perplexity(dense, ids).windows
            with pytest.raises(KeyboardInterrupt):
                real.stored_losses(dense, ids, progress=stop_at(4))
            for _ in range(2):
                losses = real.stored_losses(dense, ids, progress=heard)
                assert losses == pytest.approx(whole)
    assert heard == [(4, 7), (6, 7), (7, 7), (7, 7)] * 2
