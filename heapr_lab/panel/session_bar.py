"""Saves the state of the panel to files, opens them, and keeps the last one.

Every panel that is displayed also has a file of its own in the cache. A panel of the
same table and test data offers the last one; nothing is shown unasked, so that a
notebook does not depend on what somebody did before. With `$HEAPR_LAB_RESUME=0` none is
kept or offered.
"""

import contextlib
import os
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ipywidgets as ipw
import msgspec
import pandas as pd

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.panel.compare_tab import CompareTab
from heapr_lab.panel.controls import Controls, WeightsBar, check_value, shown_by
from heapr_lab.panel.inspect_tab import InspectTab
from heapr_lab.panel.jobs import Debounced
from heapr_lab.panel.looks import beside, button, failure, line, status
from heapr_lab.panel.session import PruningSession
from heapr_lab.panel.session_file import (
    Inspected,
    SavedSession,
    Tests,
    fingerprint_of,
    points_of,
    read_session,
    rows_of,
    write_session,
)
from heapr_lab.storage.cache import cache_path
from heapr_lab.storage.hashing import digest

if TYPE_CHECKING:
    from heapr_lab.workbench.workbench import Workbench

VARIABLE: Final = "HEAPR_LAB_RESUME"
KIND: Final = "sessions"
"""Folder in the cache, with a folder for each table and its test data."""
SECONDS: Final = 1.0
"""Seconds from the last change to the file: moves must not wait for it."""
MOST_KEPT: Final = 8
"""Sessions of one table; the oldest are removed."""


class SessionBar(ipw.VBox):
    """A file name, a button that saves and one that opens, and what came of it."""

    def __init__(
        self,
        session: PruningSession,
        controls: Controls,
        comparison: CompareTab,
        inspection: InspectTab,
        *,
        weights: WeightsBar,
        refresh: Callable[[], None],
    ) -> None:
        """Lay the bar out.

        Args:
            session: its selection, calibration and points are saved.
            controls: they show the selection.
            comparison: its pins are saved.
            inspection: its text and numbers are saved.
            weights: its recipe is saved.
            refresh: called after a file was opened.
        """
        self._session, self._controls = session, controls
        self._comparison, self._inspection = comparison, inspection
        self._weights, self._refresh = weights, refresh
        self._opened: SavedSession | None = None
        self._undo: Callable[[], object] = lambda: None
        self._texts: dict[str, str] = {}
        self.file = line("session file", "session.json")
        self.save_button = button(
            "Save session",
            "write selection, calibration, pins, evaluations and text",
            self._press_save,
        )
        self.open_button = button(
            "Open session",
            "show one that was saved with the same model and calibration",
            self._press_open,
        )
        back = "go back to the previous session, or the previous file"
        self.undo_button = button("Undo", back, self._press_undo)
        self.undo_button.layout.display = "none"
        self.message = ipw.HTML(status(""))
        row = self.file, self.save_button, self.open_button, self.undo_button
        super().__init__([beside(*row), self.message])

    # --- saving -------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        """What a session must share with this panel to be shown in it: table, tests."""
        tests = msgspec.to_builtins(self._tests())
        return {"table": fingerprint_of(self._session.table), "tests": tests}

    def saved(self) -> SavedSession:
        """The state of the panel.

        Raises:
            SpecError: the settings are infeasible.
        """
        session = self._session
        saved = SavedSession(
            fingerprint_of(session.table),
            _measured_for(session),
            self._tests(),
            self._texts_of(session.points),
            session.calibration,
            session.selection,
            session.recipe,
            tuple(self._comparison.pins),
            points_of(session.points),
            self._inspected(),
            self._inspection.map.state,
            rows_of(self._comparison.runs.rows),
        )
        if session.workbench is None and self._opened is not None:
            # What only a model can use is passed on.
            saved = msgspec.structs.replace(
                saved,
                tests=self._opened.tests,
                texts=self._opened.texts,
                inspected=self._opened.inspected,
                recipe=self._opened.recipe,
            )
        return saved

    def _tests(self) -> Tests | None:
        bench = self._session.workbench
        if bench is None:
            return None
        profile = bench.profile
        return Tests(profile.seq_len, profile.n_test, profile.n_items)

    def _texts_of(self, points: pd.DataFrame) -> dict[str, str]:
        """Hash of the test data of each corpus and task that is here.

        They stay the same in one panel, so each is computed once.
        """
        bench = self._session.workbench
        if bench is None:
            return {}
        tasks = set(points["dataset"][points["accuracy"].notna()])
        names = points["dataset"].unique().tolist()
        for name in set(names) - set(self._texts):
            # What is not here cannot be measured here, either.
            with contextlib.suppress(HeaprLabError):
                self._texts[name] = _text_of(bench, name, is_task=name in tasks)
        return {name: self._texts[name] for name in names if name in self._texts}

    def _inspected(self) -> Inspected | None:
        if self._session.workbench is None:
            return None
        names = Inspected.__struct_fields__
        return Inspected(*(shown_by(getattr(self._inspection, n)) for n in names))

    # --- opening ------------------------------------------------------------------

    def replace(self, saved: SavedSession) -> None:
        """As `restore`, with a button that shows what was shown before.

        Raises:
            SpecError: as `restore`; or the settings are infeasible.
        """
        before = self.saved()
        self.restore(saved)
        self._offer_undo(lambda: self.restore(before))

    def restore(self, saved: SavedSession) -> None:
        """Show `saved`; the calibration stays, which measured the same table.

        Everything is checked before anything changes.

        Raises:
            SpecError: it is of another table or of other test data, or a value is
                infeasible, or has no control.
        """
        self._check_same(saved)
        fresh = self._check_selections(saved)
        inspected = self._checked_inspected(saved)
        self._inspection.map.check_state(saved.map, n_pins=len(saved.pins))
        self._session.points = saved.frame()
        methods = list(map(dict, saved.methods))
        self._comparison.show_pins(list(saved.pins), rows=methods)
        for name, value in inspected.items():
            getattr(self._inspection, name).value = value
        if self._session.workbench is not None:
            self._weights.show(saved.recipe)
        self._controls.show(fresh)
        self._opened = saved
        self._refresh()
        self._inspection.map.show_state(saved.map)

    def _check_same(self, saved: SavedSession) -> None:
        table = fingerprint_of(self._session.table)
        if saved.table != table:
            raise SpecError(
                f"the session is of another model, calibration or table: its "
                f"fingerprint is {saved.table[:12]}, that of the panel {table[:12]}; "
                "open the panel with the model and the calibration it was saved with"
            )
        tests = self._tests()
        if tests is not None and saved.points and saved.tests != tests:
            raise SpecError(
                f"the evaluations of the session are on {saved.tests}, expected "
                f"{tests}: open the panel with the profile it was saved with"
            )
        for name, text in self._texts_of(saved.frame()).items():
            if text != saved.texts.get(name, text):
                raise SpecError(
                    f"{name} is another text, or has other items, than when the "
                    "session was saved, so its evaluations cannot stand beside new ones"
                )

    def _check_selections(self, saved: SavedSession) -> Controls:
        """Controls that show the saved selection.

        Raises:
            SpecError: it or a pin is infeasible, or a part of it has no control.
        """
        for selection in (saved.selection, *(pin.selection for pin in saved.pins)):
            self._session.keep_of(selection)
        fresh = Controls(self._session.table, saved.selection, lambda: None)
        if fresh.selection != saved.selection:
            raise SpecError(
                f"the panel would show {fresh.selection!r} for {saved.selection!r}: it "
                "has no control for a part of it"
            )
        return fresh

    def _checked_inspected(self, saved: SavedSession) -> dict[str, Any]:
        """The values for the controls of Inspect; empty without a model."""
        if self._session.workbench is None or saved.inspected is None:
            return {}
        values = msgspec.structs.asdict(saved.inspected)
        for name, value in values.items():
            if name not in {"text", "position"}:  # the text decides on the last one
                check_value(getattr(self._inspection, name), value)
        return values

    # --- buttons ------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return Path(self.file.value).expanduser()

    def _press_save(self, _button: ipw.Button) -> None:
        self._tried(self._save, f"Saved to {self.file.value}")

    def _save(self) -> None:
        path = self._path
        before = path.read_bytes() if path.is_file() else None
        write_session(path, self.saved())
        if before is not None:
            self._offer_undo(lambda: path.write_bytes(before))

    def _press_open(self, _button: ipw.Button) -> None:
        opened = f"Opened {self.file.value}"
        self._tried(lambda: self.replace(read_session(self._path)), opened)

    def _offer_undo(self, undo: Callable[[], object]) -> None:
        self._undo, self.undo_button.layout.display = undo, None

    def _press_undo(self, _button: ipw.Button) -> None:
        self.undo_button.layout.display = "none"
        self._tried(self._undo, "Undone")

    def _tried(self, work: Callable[[], object], done: str) -> None:
        try:
            work()
        except (HeaprLabError, OSError) as error:
            self.message.value = failure(error)
        else:
            self.message.value = status(done)


def _text_of(bench: "Workbench", dataset: str, *, is_task: bool) -> str:
    """Hash of what is measured on a corpus, or on the items of a task."""
    if is_task:
        return digest(bench.task_key(dataset, bench.profile.n_items))
    return bench.test_windows(dataset).fingerprint


def _measured_for(session: PruningSession) -> str:
    """The estimator that the table was measured for: one with an extra pass, if any."""
    extra = (e for e in session.table.estimators if ESTIMATORS[e].extra_pass)
    return next(extra, "heapr")


# --- kept in the cache ----------------------------------------------------------------


class LastSession(ipw.HBox):
    """Keeps the state of a displayed panel, and offers the last one of another.

    Attributes:
        path: the file of this panel; None if none is kept.
        earlier: the file of the last session of another panel, if there is one.
        message: what is offered, or what went wrong.
        resume: the button that shows the session that is offered.
    """

    def __init__(self, files: SessionBar) -> None:
        """Offer the last session.

        Args:
            files: it has the state of the panel, and can show another.
        """
        self._files, self._shown = files, False
        self._soon = Debounced(self.write, SECONDS)
        self.path = self.earlier = None
        if os.environ.get(VARIABLE) != "0":
            folder = cache_path(KIND, files.place(), extension="json").with_suffix("")
            self.path = folder / f"{uuid.uuid4().hex}.json"
            self.earlier = next(reversed(_sessions_in(folder)), None)
        self.message = ipw.HTML()
        hint = "show the pins, evaluations and settings of that session"
        self.resume = button("Resume", hint, self._press)
        layout = {"flex_flow": "row wrap", "display": "none"}
        super().__init__([self.message, self.resume], layout=layout)
        if self.earlier is not None:
            since = datetime.fromtimestamp(self.earlier.stat().st_mtime)
            self._say(status(f"A session of this table is kept, of {since:%F %H:%M}."))

    def _press(self, _button: ipw.Button) -> None:
        assert self.earlier is not None  # or there is no button
        try:
            self._files.replace(read_session(self.earlier))
        except (HeaprLabError, OSError) as error:
            self._say(failure(error, what="The session cannot be shown: "))
        else:
            self.layout.display = "none"

    def _say(self, text: str) -> None:
        self.message.value, self.layout.display = text, None

    def follow(self) -> None:
        """Keep every change from now on; called when the panel is displayed."""
        self._shown = True

    def changed(self) -> None:
        """Have the state written soon."""
        if self._shown and self.path is not None:
            self._soon.again()

    def write(self) -> None:
        """Write the state; an infeasible one leaves the file as it was."""
        if self.path is None:
            return
        try:
            saved = self._files.saved()
        except SpecError:  # the panel says what is infeasible
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_session(self.path, saved)
            for old in _sessions_in(self.path.parent)[:-MOST_KEPT]:
                old.unlink(missing_ok=True)
        except (HeaprLabError, OSError) as error:
            self.resume.layout.display = "none"
            self._say(failure(error, what="This session is not kept: "))


def _sessions_in(folder: Path) -> list[Path]:
    """The files of sessions, the last one last; none that is being written."""
    files = []
    for path in folder.glob("[!.]*.json"):
        with contextlib.suppress(FileNotFoundError):  # another panel removed it
            files.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(files)]
