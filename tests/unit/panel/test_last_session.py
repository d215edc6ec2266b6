"""The last session of a table is shown when its panel opens again."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_tables import random_table, small_table

from heapr_lab.panel import last_session, static_copy
from heapr_lab.panel.last_session import KIND, VARIABLE
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.panel.session import PruningSession
from heapr_lab.panel.session_file import VERSION
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench

WAIT_SECONDS = 30


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sessions are kept, in a cache of its own; nothing is displayed."""
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(last_session, "SECONDS", 0.01)
    monkeypatch.setattr(static_copy, "display", lambda *_, **__: None)
    return tmp_path / "cache" / KIND


def displayed(source: Any, **options: Any) -> Explorer:
    """A panel that somebody sees."""
    panel = explore(source, **options)
    assert isinstance(panel, Explorer)
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


def is_shown(panel: Explorer) -> bool:
    """Whether it says that a last session is shown."""
    said = "The last session of this table is shown" in panel.last.message.value
    assert said == (panel.last.layout.display is None)
    return said


def test_it_appears_when_the_panel_opens_again() -> None:
    """Selection and pins; *Start afresh* goes back, and that is kept as well."""
    first = displayed(small_table())
    assert not is_shown(first)
    use(first)
    again = displayed(small_table())
    assert is_shown(again)
    assert again.session.selection == Selection(0.5)
    assert again.controls.ratio.value == "0.5"
    assert again.comparison.pins == first.comparison.pins
    again.last.afresh.click()
    assert again.last.layout.display == "none"
    assert again.session.selection == Selection(0.25)
    assert again.comparison.pins == []
    kept(again, lambda text: '"pins": []' in text)
    assert explore(small_table()).session.selection == Selection(0.25)


def test_evaluations_appear_too(bench: Workbench, root: Path) -> None:
    """With everything that is said of them; none is measured again."""
    text = str(root / "text.txt")
    asked: dict[str, Any] = {
        "corpora": (text,), "tasks": (f"continuation:{text}",),
        "calibration": Calibration(text, seed=3),
    }  # fmt: skip
    first = displayed(bench, **asked)
    first.controls.ratio.value = "0.5"
    first.evaluation.job.button.click()
    first.evaluation.job.wait(WAIT_SECONDS)
    kept(first, lambda text: '"nll"' in text)
    again = displayed(bench, **asked)
    assert is_shown(again)
    assert again.numbers.value == first.numbers.value
    columns = ["dataset", "weights", "nll", "delta_nll", "stderr", "accuracy"]
    left, right = (p.session.points[columns].astype(str) for p in (first, again))
    assert left.equals(right)


def test_another_text_is_noticed(
    bench: Workbench, root: Path, tmp_path: Path, folder: Path
) -> None:
    """Evaluations on what a file was before do not stand beside those on what it is."""
    own = tmp_path / "mine.txt"
    own.write_text((root / "text.txt").read_text())
    asked: dict[str, Any] = {
        "corpora": (str(own),), "tasks": (),
        "calibration": Calibration(str(root / "text.txt"), seed=3),
    }  # fmt: skip
    first = displayed(bench, **asked)
    first.evaluation.job.button.click()
    first.evaluation.job.wait(WAIT_SECONDS)
    kept(first, lambda text: '"nll"' in text)
    own.write_text((root / "text.txt").read_text()[::-1])
    again = displayed(bench, **asked)
    assert "mine.txt is another text" in again.last.message.value
    assert again.session.points.empty
    assert again.last.afresh.layout.display == "none"
    assert [path.suffixes for path in folder.iterdir()] == [[".aside", ".json"]]


def test_nothing_is_kept_of_a_panel_that_nobody_sees(folder: Path) -> None:
    """Nor of one that was only opened."""
    explore(small_table()).controls.ratio.value = "0.5"
    displayed(small_table())
    time.sleep(0.1)
    assert not folder.exists()


def test_who_asks_for_something_else_gets_it(tmp_path: Path) -> None:
    """A selection, the file or object of a session, or none; likewise other tables."""
    use(first := displayed(small_table()))
    chosen = explore(small_table(), selection=Selection(0.75))
    assert chosen.session.selection == Selection(0.75)
    assert len(chosen.comparison.pins) == 1
    assert explore(small_table(), resume=False).comparison.pins == []
    assert explore(PruningSession(small_table())).comparison.pins == []
    first.comparison.clear()
    first.files.file.value = str(tmp_path / "s.json")
    first.files.save_button.click()
    again = explore(small_table(), session=tmp_path / "s.json")
    assert again.comparison.pins == []
    assert explore(random_table(2, 4, 2)).comparison.pins == []


@pytest.mark.parametrize("wrong", ['"version": 3', "}"])
def test_a_file_that_cannot_be_shown_is_said(folder: Path, wrong: str) -> None:
    """The panel opens as usual, goes on, and the file is not lost."""
    first = displayed(small_table())
    use(first)
    path, first.last.path = first.last.path, None  # nothing more is kept
    assert path is not None
    time.sleep(0.2)
    text = path.read_text()
    path.write_text(text.replace(f'"version": {VERSION}', wrong))
    again = displayed(small_table())
    assert 'role="alert"' in again.last.message.value
    assert again.session.selection == Selection(0.25)
    use(again)
    (aside,) = folder.glob("*.aside.json")
    assert wrong in aside.read_text()


def test_an_infeasible_state_is_not_kept() -> None:
    """The last feasible one stays."""
    panel = displayed(small_table())
    use(panel)
    panel.controls.ratio.value = "7"
    panel.last.write()
    assert panel.last.message.value == ""
    assert '"ratio": 0.5' in kept(panel, bool)


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes nothing of the panel."""
    panel = displayed(small_table())

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(last_session, "write_session", fail)
    panel.last.write()
    assert "This session is not kept: no space left" in panel.last.message.value
    assert panel.last.layout.display is None


def test_it_can_be_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks that are run to be published see nothing of it, and leave nothing."""
    use(displayed(small_table()))
    (file,) = folder.iterdir()
    before = file.read_bytes()
    monkeypatch.setenv(VARIABLE, "0")
    panel = displayed(small_table())
    assert panel.comparison.pins == []
    assert panel.last.path is None
    panel.controls.ratio.value = "0.75"
    time.sleep(0.1)
    assert file.read_bytes() == before
