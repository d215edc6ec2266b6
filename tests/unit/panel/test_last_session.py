"""The last session of a table is offered when its panel opens again."""

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pressing import told
from random_tables import random_table, small_table

from heapr_lab.panel import jobs, keeping
from heapr_lab.panel.keeping import KEPT, VARIABLE
from heapr_lab.panel.opening import explore
from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session_file import VERSION
from heapr_lab.pruning.options import Selection

WAIT_SECONDS = 30


@pytest.fixture(autouse=True)
def folder(cache, monkeypatch) -> Path:
    """Where sessions are kept, in a cache of its own; nothing is displayed."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(jobs, "SECONDS", 0.01)
    monkeypatch.setattr(keeping, "display", lambda *_, **__: None)
    return cache / KEPT


def displayed(source: Any, **options: Any) -> Explorer:
    """A panel that somebody sees."""
    panel = explore(source, **options)
    panel._ipython_display_()
    return panel


def kept(panel: Explorer, done: Callable[[str], bool]) -> str:
    """The file of a panel, once `done` of its text."""
    path, deadline = panel.last.path, time.monotonic() + WAIT_SECONDS
    assert path is not None
    while time.monotonic() < deadline:
        if path.is_file() and done(text := path.read_text()):
            return text
        time.sleep(0.02)
    raise AssertionError(f"not kept within {WAIT_SECONDS} s: {path}")


def use(panel: Explorer) -> None:
    """Choose 50 %, pin it, and wait until this is kept."""
    panel.controls.ratio.value = "0.5"
    panel.comparison.pin()
    kept(panel, lambda text: '"label": "A"' in text and '"ratio": 0.5' in text)


def offers(panel: Explorer) -> bool:
    """Whether it says that there is a session."""
    offered = "of this table " in panel.last.message.value
    assert offered == (panel.last.layout.display is None)
    return offered


def test_it_is_offered_when_the_panel_opens_again(folder):
    """Selection and pins, once asked for; *Undo* goes back. Each has its own file."""
    first = displayed(small_table())
    assert not offers(first)
    use(first)
    again = displayed(small_table())
    assert offers(again)
    assert again.session.selection == Selection(0.25)
    again.last.resume.click()
    assert again.last.layout.display == "none"
    assert again.session.selection == Selection(0.5)
    assert again.controls.ratio.value == "0.5"
    assert again.comparison.pins == first.comparison.pins
    again.files.undo_button.click()
    assert again.session.selection == Selection(0.25)
    assert again.comparison.pins == []
    kept(again, lambda text: '"pins": []' in text)
    kept(first, lambda text: '"label": "A"' in text)
    assert len(list(folder.glob("*/[!.]*.json"))) == 2
    assert explore(small_table()).session.selection == Selection(0.25)


def test_each_can_be_chosen():
    """The last one is offered first; one that was barely used hides none."""
    use(displayed(small_table()))
    nudged = displayed(small_table())
    nudged.controls.ratio.value = "0.75"
    kept(nudged, lambda text: '"ratio": 0.75' in text)
    again = displayed(small_table())
    assert "2 sessions of this table are kept" in again.last.message.value
    labels, (last, first) = zip(*again.last.earlier.options, strict=True)
    assert ["1 pinned, 0 evaluated" in label for label in labels] == [False, True]
    assert again.last.earlier.value == last == nudged.last.path
    again.last.earlier.value = first
    again.last.resume.click()
    assert again.session.selection == Selection(0.5)
    assert len(again.comparison.pins) == 1


def test_the_oldest_are_removed(folder, monkeypatch):
    """One table has many panels."""
    monkeypatch.setattr(keeping, "MOST_KEPT", 2)
    for _ in range(3):
        use(displayed(small_table()))
    assert len(list(folder.glob("*/[!.]*.json"))) == 2


def test_one_may_go_while_the_panel_opens(tmp_path, monkeypatch):
    """Another panel removes the oldest; the time of its last change is known still."""
    gone = tmp_path / "gone.json"
    monkeypatch.setattr(keeping, "_sessions_in", lambda _: [(0.0, gone)])
    ((label, path),) = displayed(small_table()).last.earlier.options
    assert path == gone
    assert label == f"{datetime.fromtimestamp(0):%F %T}"


def test_nothing_is_kept_of_a_panel_that_nobody_sees(folder):
    """Nothing is kept of one that was only opened either."""
    explore(small_table()).controls.ratio.value = "0.5"
    displayed(small_table())
    time.sleep(0.1)
    assert not folder.exists()


def test_a_file_that_is_being_written_is_no_session(folder):
    """Another panel writes it under a name that begins with a dot, and renames it."""
    use(first := displayed(small_table()))
    partial = first.last.path.with_name(".partial-1-x.json")
    partial.write_text("{")
    assert offers(again := displayed(small_table()))
    assert again.last.earlier.value == first.last.path


def test_who_asks_for_something_else_gets_it(tmp_path, monkeypatch):
    """The file of a session, below `~` as well; other tables are not offered it."""
    use(first := displayed(small_table()))
    first.comparison.clear()
    monkeypatch.setenv("HOME", str(tmp_path))
    told(first, "~/s.json")
    assert (tmp_path / "s.json").is_file()
    again = explore(small_table(), session="~/s.json")
    assert again.session.selection == Selection(0.5)
    assert again.comparison.pins == []
    assert not offers(explore(random_table(2, 4, 2)))


def test_a_file_that_is_written_over_can_be_had_back(tmp_path):
    """What was shown before another session was opened comes back, too."""
    panel = explore(small_table())
    files = panel.files
    told(panel, tmp_path / "s.json")
    assert files.undo_button.layout.display == "none"
    before = (tmp_path / "s.json").read_bytes()
    panel.controls.ratio.value = "0.5"
    files.save_button.click()
    assert (tmp_path / "s.json").read_bytes() != before
    for after in (before, (tmp_path / "s.json").read_bytes(), before):
        files.undo_button.click()
        assert (tmp_path / "s.json").read_bytes() == after
    files.open_button.click()
    assert panel.session.selection == Selection(0.25)
    files.undo_button.click()
    assert panel.session.selection == Selection(0.5)


def test_weights_that_choose_are_opened_too(panel, tmp_path):
    """Although they were not made here; *Undo* goes back to them as well."""
    files, weights = panel.files, panel.weights.weights
    weights.value, panel.weights.own.value = "compress", 40
    panel.comparison.pin()
    recipe = panel.session.recipe
    told(panel, tmp_path / "s.json")
    weights.value = "unchanged"
    for press_one, value in (
        (files.open_button, "compress"),
        (files.undo_button, "unchanged"),
        (files.undo_button, "compress"),
    ):
        press_one.click()
        assert 'role="alert"' not in files.message.value
        assert weights.value == value
    assert panel.session.recipe == panel.comparison.pins[0].recipe == recipe


def test_a_file_that_cannot_be_shown_is_said():
    """The panel stays as it is, and the file as well."""
    first = displayed(small_table())
    use(first)
    path, first.last.path = first.last.path, None  # nothing more is kept
    assert path is not None
    time.sleep(0.2)
    older = path.read_text().replace(f'"version": {VERSION}', '"version": 3')
    path.write_text(older)
    again = displayed(small_table())
    again.last.resume.click()
    assert 'role="alert"' in again.last.message.value
    assert again.session.selection == Selection(0.25)
    use(again)
    assert path.read_text() == older


def test_an_infeasible_state_is_not_kept():
    """The last feasible one stays."""
    panel = displayed(small_table())
    use(panel)
    panel.controls.ratio.value = "7"
    panel.last.write()
    assert panel.last.message.value == ""
    assert '"ratio": 0.5' in kept(panel, bool)


def test_a_full_disk_is_said(monkeypatch):
    """It takes nothing of the panel."""
    panel = displayed(small_table())

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(keeping, "write_session", fail)
    panel.last.write()
    assert "This session is not kept: no space left" in panel.last.message.value
    assert panel.last.layout.display is None


def test_it_can_be_turned_off(folder, monkeypatch):
    """Notebooks that are run to be published see nothing of it, and leave nothing."""
    use(displayed(small_table()))
    (file,) = folder.glob("*/[!.]*.json")
    before = file.read_bytes()
    monkeypatch.setenv(VARIABLE, "0")
    panel = displayed(small_table())
    assert not offers(panel)
    assert panel.last.path is None
    panel.controls.ratio.value = "0.75"
    time.sleep(0.1)
    assert file.read_bytes() == before
