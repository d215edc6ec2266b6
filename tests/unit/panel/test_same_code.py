"""The code in the Export tab is of what the panel shows, or says why there is none."""

import html
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run

from heapr_lab.errors import SpecError
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.panel.same_code import check_calibration
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench, open_workbench


def text_of(shown: Any) -> str:
    """The code in a `pre`, as it is copied."""
    found = re.search(r"<pre[^>]*>(.*?)</pre>", shown.value, re.DOTALL)
    assert found is not None, shown.value
    return html.unescape(found[1])


@pytest.fixture
def shown(bench: Workbench, root: Path, tmp_path: Path, monkeypatch: Any) -> Explorer:
    """A panel of the model and the text, whose code is shown."""
    monkeypatch.chdir(tmp_path)
    text = str(root / "text.txt")
    panel = explore(bench, corpora=(text,), tasks=(), calibration=Calibration(text))
    assert isinstance(panel, Explorer)
    panel.export.code.selected_index = 0
    return panel


def set_controls(panel: Explorer) -> None:
    """A selection that no default gives."""
    controls, tab = panel.controls, panel.export
    controls.ratio.value, controls.estimator.value = "0.375", "shrunk"
    controls.structure.value, controls.multiple.value = "uniform", 2
    tab.folder.value, tab.weights.value = "my model", "unchanged"


def test_all_three_prune_the_same(shown: Explorer) -> None:
    """The panel, the Python and the command: one mask, of the settings shown."""
    code = shown.export.code
    before = code.python.value, code.command.value
    set_controls(shown)
    assert code.python.value != before[0]
    names: dict[str, Any] = {}
    exec(text_of(code.python), names)
    assert names["keep"].fingerprint == shown.session.keep.fingerprint
    Path("my model").rename("of python")
    words = shlex.split(text_of(code.command))
    run(*words[1:])
    command = KeepMask.read("my model/heapr_keep.parquet")
    assert command.fingerprint == shown.session.keep.fingerprint
    Path("my model").rename("of command")
    shown.export.job.button.click()
    shown.export.job.wait(60)
    assert shown.export.job.error.value == ""
    exported = KeepMask.read("my model/heapr_keep.parquet")
    assert exported.fingerprint == command.fingerprint


def test_each_control_of_the_tab_is_followed(shown: Explorer) -> None:
    """Options appear in both texts when they are set, and only then."""
    tab, code = shown.export, shown.export.code
    assert "--own-text" not in text_of(code.command)
    tab.own.value, tab.bias.value, tab.distill.value = 40, True, 50
    assert "--own-text 0.4 --bias --distill 50" in text_of(code.command)
    assert "own_text=0.4" in text_of(code.python)
    assert "n_steps=50" in text_of(code.python)
    tab.folder.value = "other"
    assert "--out other" in text_of(code.command)
    tab.weights.value = "compensated"
    assert "--own-text" not in text_of(code.command)
    assert "--estimator heapr" in text_of(code.command)
    tab.folder.value = "mask.parquet"
    assert "the file of a mask" in code.command.value


def test_corpora_of_evaluations_are_in_the_card(
    shown: Explorer, root: Path, tmp_path: Path
) -> None:
    """As soon as they are measured, without a further move of a control."""
    other = tmp_path / "b.txt"
    other.write_bytes((root / "text.txt").read_bytes())
    assert "--perplexity" not in text_of(shown.export.code.command)
    shown.session.evaluate([str(other)])
    shown._on_points()
    both = f"--perplexity {root / 'text.txt'},{other} "
    assert both in text_of(shown.export.code.command)


def test_nothing_is_written_while_it_is_hidden(shown: Explorer) -> None:
    """A closed box costs nothing, and is right when it is opened again."""
    code = shown.export.code
    code.selected_index = None
    before = code.command.value
    shown.controls.ratio.value = "0.125"
    assert code.command.value == before
    code.selected_index = 0
    assert "--ratio 0.125" in text_of(code.command)


def test_what_code_cannot_do_is_said(
    shown: Explorer, panel: Explorer, root: Path
) -> None:
    """Infeasible settings, another calibration, a changed profile, no name."""
    code = shown.export.code
    shown.controls.ratio.value = "half"
    assert "infeasible" in code.python.value
    assert "infeasible" in code.command.value
    panel.export.code.selected_index = 0  # of a table of other windows
    assert "the table was measured on: 4 windows" in panel.export.code.python.value
    changed = open_workbench(str(root / "moe"), profile="small")
    changed.profile = replace(changed.profile, n_sequences=5)
    calibration = Calibration(str(root / "text.txt"))
    other = explore(changed, corpora=(), tasks=(), calibration=calibration)
    assert isinstance(other, Explorer)
    other.export.code.selected_index = 0
    assert "open it again with a profile" in other.export.code.command.value
    changed.opening = None
    other.export.code.refresh()
    assert "a model in memory" in other.export.code.command.value


def test_a_table_is_named_if_it_has_a_file(folder: Path) -> None:
    """The panel of a path names it; a table in memory cannot be named."""
    panel = explore(folder / "table.parquet")
    assert isinstance(panel, Explorer)
    panel.export.code.selected_index = 0
    expected = f"hl.ImportanceTable.read('{folder / 'table.parquet'}')"
    # A long path is on a line of its own, with a comma behind it.
    code = re.sub(r"\s*\n\s*", "", text_of(panel.export.code.python))
    assert expected in code.replace(",)", ")")
    assert "--importance" in text_of(panel.export.code.command)
    alone = explore(panel.session.table)
    alone.export.code.selected_index = 0
    assert "not in a file" in alone.export.code.python.value


def test_own_text_is_counted_in_windows(bench: Workbench, root: Path) -> None:
    """A share that is recorded as windows is the same calibration."""
    text = str(root / "text.txt")
    calibration = Calibration(text, own_text=0.3)  # 2 of 8 windows, recorded as 0.25
    panel = explore(bench, corpora=(), tasks=(), calibration=calibration)
    assert isinstance(panel, Explorer)
    panel.export.code.selected_index = 0
    panel.export.weights.value = "unchanged"
    assert "--own-text 0.3" in text_of(panel.export.code.command)


def test_a_text_that_was_moved_is_the_same(bench: Workbench, root: Path) -> None:
    """The table in the cache names the old file, whose windows were the same."""
    text, moved = root / "text.txt", root / "moved.txt"
    panel = explore(bench, corpora=(), tasks=(), calibration=Calibration(str(text)))
    table = panel.session.table
    moved.write_bytes(text.read_bytes())
    calibration = Calibration(str(moved))
    session = PruningSession(table, workbench=bench, calibration=calibration)
    check_calibration(session, bench)
    moved.write_text("other words. " * 2000, "utf-8")
    fresh = open_workbench(str(root / "moe"), profile="small")
    with pytest.raises(SpecError, match="the table was measured on"):
        check_calibration(session, fresh)
