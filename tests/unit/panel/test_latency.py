"""Pins are timed in their sliced form, and the chart shows what that saves."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_tables import small_table
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.panel.compare_tab import CompareTab, on_front
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.pruning.options import Selection
from heapr_lab.workbench import budgets
from heapr_lab.workbench.workbench import open_workbench

DENSE, PRUNED = [2.0, 4.0, 3.0], [1.0, 3.0, 1.5]
SAVED = 0.5
"""One minus the median of the ratios 0.5, 0.75 and 0.5."""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, nn.Module, nn.Module]]:
    """Prompts and models that are timed; their times are `DENSE` and `PRUNED`."""
    seen: list[tuple[Any, nn.Module, nn.Module]] = []

    def rounds(prompts: Any, dense: nn.Module, pruned: nn.Module) -> list[list[float]]:
        seen.append((prompts, dense, pruned))
        return [DENSE, PRUNED]

    monkeypatch.setattr(budgets, "decoding_rounds", rounds)
    return seen


def pin(panel: Explorer, ratio: str) -> CompareTab:
    """The tab, with one more pin."""
    panel.controls.ratio.value = ratio
    panel.comparison.pin()
    return panel.comparison


def press(tab: CompareTab) -> str:
    """Press the button, and wait; what is said of it."""
    tab.latency.button.click()
    tab.latency.wait(60)
    return str(tab.latency.error.value)


def test_pins_are_timed_as_sliced_models(panel: Explorer, timed: list[Any]) -> None:
    """Each against the dense model, which stays as it is; the table has the share."""
    pin(panel, "0.5")
    tab = pin(panel, "0.25")
    assert press(tab) == ""
    bench = panel.session.workbench
    assert bench is not None
    for (prompts, dense, pruned), own in zip(timed, tab.pins, strict=True):
        windows = bench.calibration_set(panel.session.calibration)
        assert prompts.tolist() == windows.ids[:1].tolist()
        assert dense is bench.model
        sliced = [m for m in pruned.modules() if hasattr(m, "heapr_widths")]
        kept = sum(sum(module.heapr_widths) for module in sliced)
        assert kept == panel.session.keep_of(own.selection).n_kept
    assert tab.frame()["latency_reduction"].tolist() == [SAVED, SAVED]
    assert "decoding time saved, measured here" in tab.table.value
    tab.axis.value = "latency_reduction"
    right = tab.figure(tab.frame()).axes[-1]
    assert right.get_xlabel() == "decoding time saved"
    drawn = {float(x) for line in right.lines for x in line.get_xdata()}
    assert drawn == {SAVED}


def test_what_was_not_timed_is_left_out_and_said(
    panel: Explorer, timed: list[Any]
) -> None:
    """A pin of later is not drawn at the place of another quantity."""
    tab = pin(panel, "0.5")
    tab.axis.value = "latency_reduction"
    before = tab.figure(tab.frame()).axes[-1].get_xlabel()
    assert before == "atomic experts removed"
    assert press(tab) == ""
    assert len(timed) == 1
    pin(panel, "0.25")
    frame = tab.frame()
    np.testing.assert_array_equal(frame["latency_reduction"], [SAVED, np.nan])
    right = tab.figure(frame).axes[-1]
    assert right.get_xlabel() == "decoding time saved; unknown of 1, left out"
    front = on_front(frame["latency_reduction"], frame["achieved_ratio"])
    assert front.tolist() == [True, False]


def test_it_runs_alone(panel: Explorer, timed: list[Any]) -> None:
    """What is timed must not share the processor, whichever was started first."""
    reached, go_on = threading.Event(), threading.Event()
    tab, evaluation = pin(panel, "0.5"), panel.evaluation.job

    def hold(change: Any) -> None:
        if " of " in change["new"]:
            reached.set()
            assert go_on.wait(60)

    tab.latency.text.observe(hold, names="value")
    tab.latency.button.click()
    assert reached.wait(60)
    for other in (evaluation, tab.runs.job, panel.foretell):
        other.button.click()
        assert "wait until Measure latency has ended" in other.error.value
        assert not other.running
    go_on.set()
    tab.latency.wait(60)
    assert len(timed) == 1


def test_without_pins_or_a_model_it_says_so(panel: Explorer) -> None:
    """In an alert, or beside a button that is off."""
    assert "nothing is pinned" in press(panel.comparison)
    alone = explore(small_table(), selection=Selection(0.5)).comparison.latency
    assert alone.button.disabled
    assert "latency needs a model" in alone.text.value


def test_a_streamed_model_is_refused(panel: Explorer, root: Path) -> None:
    """Its time would be that of the disk."""
    bench = open_workbench(str(root / "moe"), profile="small", stream=True)
    keep = panel.session.keep_of(Selection(0.5))
    with pytest.raises(SpecError, match="streamed from the disk"):
        budgets.share_of_decoding(bench, keep, panel.session.calibration)
