"""What several tests start from: a session that was measured, and its panel."""

import pytest
from pressing import panel_on

from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session import PruningSession
from heapr_lab.text.calibration_spec import Calibration


@pytest.fixture
def session(bench, root) -> PruningSession:
    """The tiny model, whose weights are masked, measured on its text."""
    calibration = Calibration(str(root / "text.txt"))
    table = bench.importance(calibration)
    return PruningSession(table, workbench=bench, calibration=calibration)


@pytest.fixture
def panel(session) -> Explorer:
    """A panel that can evaluate the masked model on the text."""
    text = session.calibration.corpus
    return panel_on(session, (text,), (f"continuation:{text}",))
