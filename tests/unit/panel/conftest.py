"""What several tests start from: a session that was measured, and a passage."""

import pytest

from heapr_lab.inspection.passages import Passage, read_passage
from heapr_lab.panel.inspect_tab import InspectTab
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import Calibration


@pytest.fixture
def session(bench, root) -> PruningSession:
    """The tiny model, whose weights are masked, measured on its text."""
    calibration = Calibration(str(root / "text.txt"))
    table = bench.importance(calibration)
    return PruningSession(table, workbench=bench, calibration=calibration)


@pytest.fixture
def tab(session) -> InspectTab:
    """The tab that inspects, with a short text, half of the model pruned."""
    session.choose(Selection(ratio=0.5))
    tab = InspectTab(session)
    tab.text.value = "the <b>other</b> & 漢"
    tab.n_tokens.value = 5
    return tab


@pytest.fixture
def passage(tab, bench) -> Passage:
    """The text of the tab."""
    return read_passage(bench.model, bench.tokenizer, text=tab.text.value)
