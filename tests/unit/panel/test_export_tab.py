"""The settings in the Export tab, as Python."""

import html
import re

from random_tables import small_table

from heapr_lab.panel.opening import explore
from heapr_lab.panel.panel import Explorer
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import Calibration


def shown_by(panel: Explorer) -> list[object]:
    """The values in the box, which is open."""
    code = re.search(r"<pre[^>]*>(.*?)</pre>", panel.export.code.text.value, re.DOTALL)
    assert code is not None, panel.export.code.text.value
    names = {"Selection": Selection, "Calibration": Calibration}
    return [eval(line, names) for line in html.unescape(code[1]).splitlines()]


def test_python_is_what_is_chosen(panel):
    """It follows the controls; windows and tokens are those of the profile."""
    session, bar = panel.session, panel.weights
    panel.export.code.selected_index = 0
    counted = session.bench.profile.counted(session.calibration)
    assert shown_by(panel) == [session.selection, counted]
    panel.controls.estimator.value = "fisher"
    assert shown_by(panel) == [session.selection, counted]
    assert session.selection.estimator == "fisher"
    bar.weights.value, bar.own.value = "compress", 40
    chosen, calibration = shown_by(panel)
    assert (chosen.estimator, calibration.own_text) == ("heapr", 0.4)
    panel.controls.ratio.value = "half"
    assert "infeasible" in panel.export.code.text.value


def test_a_table_alone_shows_its_selection():
    """What it was measured on may not be recorded."""
    panel = explore(small_table())
    panel.export.code.selected_index = 0
    assert shown_by(panel) == [panel.session.selection]
