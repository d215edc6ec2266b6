"""The Python in the Export tab is what the panel shows, or it says why not."""

import html
import re
from pathlib import Path
from typing import Any

import pytest
from pressing import panel_on

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.export_tab import check_calibration
from heapr_lab.panel.opening import explore
from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import open_workbench


def shown_by(panel: Explorer) -> str:
    """What the box with the Python shows once it is open."""
    panel.export.code.selected_index = 0
    return str(panel.export.code.text.value)


def code_of(panel: Explorer) -> str:
    """The code in the `pre`, as it is copied."""
    shown = shown_by(panel)
    match = re.search(r"<pre[^>]*>(.*?)</pre>", shown, re.DOTALL)
    assert match is not None, shown
    return html.unescape(match[1])


@pytest.fixture
def shown(panel, tmp_path, monkeypatch) -> Explorer:
    """A panel of the model and the text, whose code is shown."""
    monkeypatch.chdir(tmp_path)
    shown_by(panel)
    return panel


def test_both_prune_the_same(shown):
    """The panel and the Python: one mask, of the settings shown."""
    before = code_of(shown)
    controls, tab = shown.controls, shown.export
    controls.ratio.value, controls.estimator.value = "0.375", "fisher"
    controls.structure.value, controls.multiple.value = "uniform", 2
    tab.folder.value, shown.weights.weights.value = "my model", "unchanged"
    assert code_of(shown) != before
    names: dict[str, Any] = {}
    exec(code_of(shown), names)
    assert names["keep"].fingerprint == shown.session.keep.fingerprint
    assert KeepMask.read("my model/heapr_keep.parquet") == shown.session.keep


def test_each_control_of_the_tab_is_followed(shown):
    """Options appear in the code when they are set, and only then."""
    tab, bar = shown.export, shown.weights
    bar.weights.value = "compress"
    bar.own.value, tab.heal.value = 40, 64
    assert "own_text=0.4" in code_of(shown)
    assert "n_sequences=64" in code_of(shown)
    tab.folder.value = "~/other"
    assert repr(str(Path.home() / "other")) in code_of(shown)
    bar.weights.value = "compensated"
    assert "own_text" not in code_of(shown)
    assert "hl.compensate" in code_of(shown)


def test_what_code_cannot_do_is_said(shown, source):
    """Infeasible settings, another calibration, no name."""
    shown.controls.ratio.value = "half"
    assert "infeasible" in shown_by(shown)
    bench, calibration = shown.session.bench, shown.session.calibration
    shown.session.table = bench.measure(bench.test_windows(calibration.corpus))
    shown.controls.ratio.value = "0.5"
    assert "the table was measured on: 4 windows" in shown_by(shown)
    unnamed = open_workbench(str(source), profile="small")
    unnamed.opening = None
    other = explore(unnamed, corpora=(), tasks=(), calibration=calibration)
    assert "a model in memory" in shown_by(other)


def test_a_table_is_named_if_it_has_a_file(folder):
    """The panel of a path names it; a table in memory cannot be named."""
    panel = explore(folder / "table.parquet")
    expected = f"hl.ImportanceTable.read('{folder / 'table.parquet'}')"
    assert expected in code_of(panel)
    alone = explore(panel.session.table)
    assert "not in a file" in shown_by(alone)


def test_own_text_is_counted_in_windows(bench, root):
    """A share that is recorded as windows is the same calibration."""
    text = str(root / "text.txt")
    calibration = Calibration(text, own_text=0.3)  # 2 of 8 windows, recorded as 0.25
    panel = explore(bench, corpora=(), tasks=(), calibration=calibration)
    assert "own_text=0.3" in code_of(panel)


def test_an_edited_table_is_not_said_to_be_measured(session):
    """Python would measure the numbers of before."""
    table = session.table
    edited = ImportanceTable(table.frame.assign(sum_h2=1.0), table.metadata)
    calibration = session.calibration
    other = PruningSession(edited, workbench=session.workbench, calibration=calibration)
    panel = panel_on(other, (calibration.corpus,))
    assert "Python would measure others" in shown_by(panel)


def test_a_text_that_was_moved_is_the_same(session, bench, root):
    """The table in the cache names the old file, whose windows were the same."""
    moved = root / "moved.txt"
    moved.write_bytes((root / "text.txt").read_bytes())
    session.calibration = Calibration(str(moved))
    check_calibration(session, bench)
    moved.write_text("other words. " * 2000, "utf-8")
    fresh = open_workbench(str(root / "moe"), profile="small")
    with pytest.raises(SpecError, match="the table was measured on"):
        check_calibration(session, fresh)
