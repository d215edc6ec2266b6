"""The panel shows the plan of a long measurement, and waits for its button."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heapr_lab.errors import SpecError
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.panel.planned import PlannedPanel
from heapr_lab.streaming import plan as planning
from heapr_lab.streaming.devices import Device
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench

CPU = Device("a processor", "cpu", 16e9, 1e11, 2e9, 1e9, "given by the test")
WAIT_SECONDS = 120


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which everything takes long."""
    monkeypatch.setattr(planning, "_SLOWEST", 1e-9)
    monkeypatch.setattr(planning, "measured", lambda *_: replace(CPU, flops=1.0))


@pytest.fixture
def calibrated(root: Path, request: pytest.FixtureRequest) -> Calibration:
    """A calibration of its own for each test, so that nothing is in the cache."""
    return Calibration(str(root / "text.txt"), 2, seed=len(request.node.name))


def shown(panel: object) -> PlannedPanel:
    """`panel`, which has to be that of a plan."""
    assert isinstance(panel, PlannedPanel)
    return panel


@pytest.mark.usefixtures("slow")
def test_a_long_measurement_waits_for_its_button(
    bench: Workbench, calibrated: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan first and nothing measured; then the panel in its place."""
    started = []
    measure = Workbench.measure

    def counted(*args: Any, **options: Any) -> Any:
        started.append(args)
        return measure(*args, **options)

    monkeypatch.setattr(Workbench, "measure", counted)
    options: dict[str, Any] = {"calibration": calibrated, "corpora": (), "tasks": ()}
    planned = shown(explore(bench, **options))
    card = planned.children[0].value
    for fact in ("in memory: all layers need", "FLOPs", "read, about", "a processor"):
        assert fact in card
    assert planned.copy.hides in planned.children
    assert started == []
    with pytest.raises(SpecError, match="press Measure"):
        _ = planned.session
    planned.job.button.click()
    planned.job.wait(WAIT_SECONDS)
    assert planned.job.error.value == ""
    (panel,) = planned.children
    assert isinstance(panel, Explorer)
    assert panel.copy.hides.value == planned.copy.hides.value
    assert panel.session.keep.n_removed > 0
    assert isinstance(explore(bench, **options), Explorer)  # it is in the cache


@pytest.mark.usefixtures("slow")
def test_cancel_keeps_the_plan(bench: Workbench, calibrated: Calibration) -> None:
    """The card stays with its button, which can be pressed again."""
    planned = shown(explore(bench, calibration=calibrated, corpora=(), tasks=()))
    before = planned.children
    planned.job.start()
    planned.job.cancel()
    planned.job.wait(WAIT_SECONDS)
    assert planned.children == before
    assert "cancelled" in planned.job.text.value
    assert not planned.job.button.disabled
    assert bench.long_plan(calibrated) is not None


def test_the_threshold_is_that_of_score(
    bench: Workbench, calibrated: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short measurements have no plan; with a lower constant they have."""
    monkeypatch.setattr(planning, "measured", lambda *_: CPU)
    assert bench.long_plan(calibrated) is None
    monkeypatch.setattr(planning, "LONG_SECONDS", 0.0)
    found = bench.long_plan(calibrated)
    assert found is not None
    assert found.seconds["scores"] > 0
