"""Saves the state of the panel to files, opens them, and keeps the last one.

Every panel that is displayed also has a file of its own in the cache. A panel of the
same table and test data offers the earlier ones; nothing is shown unasked, so that a
notebook does not depend on what somebody did before. With `$HEAPR_LAB_RESUME=0` none is
kept or offered.
"""

import contextlib
import functools
import os
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import ipywidgets as ipw
import msgspec

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.compare_tab import CompareTab
from heapr_lab.panel.controls import Controls, WeightsBar
from heapr_lab.panel.inspect_tab import InspectTab
from heapr_lab.panel.jobs import Debounced
from heapr_lab.panel.looks import beside, button, failure, line, one_of, status
from heapr_lab.panel.session import PruningSession
from heapr_lab.panel.session_file import (
    KIND,
    VERSION,
    Inspected,
    SavedSession,
    Tests,
    fingerprint_of,
    is_as_measured,
    path_of,
    points_of,
    read_session,
    rows_of,
    write_session,
)
from heapr_lab.recipes.weights import MASKED
from heapr_lab.storage.cache import cache_path

VARIABLE: Final = "HEAPR_LAB_RESUME"
KEPT: Final = "sessions"
"""Folder in the cache, with a folder for each table and its test data."""
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
            inspection: its text is saved.
            weights: its recipe is saved.
            refresh: called after a file was opened.
        """
        self._session, self._controls = session, controls
        self._comparison, self._inspection = comparison, inspection
        self._weights, self._refresh = weights, refresh
        self._opened: SavedSession | None = None
        self._undo: Callable[[], object] = lambda: None
        self.file = line("session file", "session.json")
        self.save_button = button(
            "Save session",
            "write selection, calibration, pins, evaluations and text",
            lambda _: self._tried(self._save, "Saved to {}"),
        )
        self.open_button = button(
            "Open session",
            "show one that was saved with the same model and calibration",
            lambda _: self._tried(self._open, "Opened {}"),
        )
        back = "go back to the previous session, or file; once more comes back here"
        self.undo_button = button(
            "Undo", back, lambda _: self._tried(self._undo, "Undone")
        )
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
            KIND,
            VERSION,
            fingerprint_of(session.table),
            _measured_for(session),
            self._tests(),
            session.texts,
            session.calibration,
            session.selection,
            session.recipe,
            tuple(self._comparison.pins),
            points_of(session.points),
            self._inspected(),
            rows_of(session.method_rows),
        )
        if session.workbench is None and self._opened is not None:
            # What only a model can use is passed on.
            saved = msgspec.structs.replace(
                saved,
                tests=self._opened.tests,
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

    def _inspected(self) -> Inspected | None:
        if self._session.workbench is None:
            return None
        return Inspected(self._inspection.text.value)

    # --- opening ------------------------------------------------------------------

    def replace(self, saved: SavedSession) -> None:
        """As `restore`, with a button that shows what was shown before, and back.

        Raises:
            SpecError: as `restore`; or the settings are infeasible, or the model is
                not loaded yet, which evaluations are checked with.
        """
        if saved.points or saved.methods:
            self._session.check_ready()
        before = self.saved()
        self.restore(saved)
        self._offer_undo(lambda: self.replace(before))

    def restore(self, saved: SavedSession) -> None:
        """Show `saved`; the calibration stays, which measured the same table.

        Everything is checked before anything changes.

        Raises:
            SpecError: it is of another table or of other test data, or a value is
                infeasible, or has no control.
        """
        self._check_same(saved)
        fresh = self._check_selections(saved)
        self._session.points, self._session.texts = saved.frame(), saved.texts
        methods = list(map(dict, saved.methods))
        self._comparison.show_pins(list(saved.pins), methods)
        if self._session.workbench is not None:
            self._weights.show(saved.recipe)
            if saved.inspected is not None:
                self._inspection.text.value = saved.inspected.text
        self._controls.show(fresh)
        self._opened = saved
        self._refresh()

    def _check_same(self, saved: SavedSession) -> None:
        table = fingerprint_of(self._session.table)
        if saved.table == self._session.table.metadata.get("spec_hash"):
            _check_unedited(self._session.table)
        elif saved.table != table:
            raise SpecError(
                f"the session is of another model, calibration or table: its "
                f"fingerprint is {saved.table[:12]}, that of the panel {table[:12]}; "
                "open the panel with the model and the calibration it was saved with"
            )
        tests = self._tests()
        measured = saved.points or saved.methods
        if tests is not None and measured and saved.tests != tests:
            raise SpecError(
                f"the evaluations of the session are on {saved.tests}, expected "
                f"{tests}: open the panel with the profile it was saved with"
            )
        tasks = {point.dataset for point in saved.points if point.accuracy is not None}
        if changed := self._session.changed(saved.texts, tasks):
            raise SpecError(
                f"{changed[0]} is another text, or has other items, than when the "
                "session was saved, so its evaluations cannot stand beside new ones"
            )

    def _check_selections(self, saved: SavedSession) -> Controls:
        """Controls that show the saved selection.

        Raises:
            SpecError: it or a pin is infeasible, or a part of it has no control.
        """
        for selection in (saved.selection, *(pin.selection for pin in saved.pins)):
            self._session.keep_of(selection, MASKED)
        fresh = Controls(self._session.table, saved.selection, lambda: None)
        fresh.check_shows(saved.selection)
        return fresh

    # --- buttons ------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return path_of(self.file.value)

    def _save(self) -> None:
        path, saved = self._path, self.saved()
        self._write(path, lambda: write_session(path, saved))

    def _write(self, path: Path, write: Callable[[], object]) -> None:
        """Write a file, with a button that brings back what it was, if it was there."""
        before = path.read_bytes() if path.is_file() else None
        write()
        if before is not None:
            back = functools.partial(path.write_bytes, before)
            self._offer_undo(lambda: self._write(path, back))

    def _open(self) -> None:
        self.replace(read_session(self._path))

    def _offer_undo(self, undo: Callable[[], object]) -> None:
        self._undo, self.undo_button.layout.display = undo, None

    def _tried(self, work: Callable[[], object], done: str) -> None:
        try:
            work()
        except (HeaprLabError, OSError) as error:
            self.message.value = failure(error)
        else:
            self.message.value = status(done.format(self.file.value))


def _check_unedited(table: ImportanceTable) -> None:
    """Make sure that a session of before, which has no hash of numbers, is of a table.

    Raises:
        SpecError: the cache has no table with the same numbers.
    """
    if not is_as_measured(table):
        raise SpecError(
            "the session is of an earlier heapr_lab, which did not record the numbers "
            "of its table, and the cache has none with those of the panel, which may "
            "have been edited: open the panel with the model"
        )


def _measured_for(session: PruningSession) -> str:
    """The estimator that the table was measured for: one with an extra pass, if any."""
    extra = (e for e in session.table.estimators if ESTIMATORS[e].extra_pass)
    return next(extra, "heapr")


# --- kept in the cache ----------------------------------------------------------------


class LastSession(ipw.HBox):
    """Keeps the state of a displayed panel, and offers those of others.

    Attributes:
        path: the file of this panel; None if none is kept.
        earlier: the list of the sessions of other panels, whose values are their files.
        message: what is offered, or what went wrong.
        resume: the button that shows the session that is chosen.
    """

    def __init__(self, files: SessionBar) -> None:
        """Offer the earlier sessions, the last one first.

        Args:
            files: it has the state of the panel, and can show another.
        """
        self._files, self._shown = files, False
        self._soon = Debounced(self.write)
        self.path, earlier = None, list[tuple[float, Path]]()
        if os.environ.get(VARIABLE) != "0":
            folder = cache_path(KEPT, files.place(), extension="json").with_suffix("")
            self.path = folder / f"{uuid.uuid4().hex}.json"
            earlier = _sessions_in(folder)[::-1]
        self.message = ipw.HTML()
        options = [(_said_of(when, path), path) for when, path in earlier]
        self.earlier = one_of("session", options, width="420px")
        hint = "show the pins, evaluations and settings of that session"
        self.resume = button("Resume", hint, self._press)
        layout = {"flex_flow": "row wrap", "display": "none"}
        super().__init__([self.message, self.earlier, self.resume], layout=layout)
        self.add_class("heapr-earlier")  # for the style
        if len(earlier) == 1:
            self._say(status("A session of this table is kept."))
        elif earlier:
            self._say(status(f"{len(earlier)} sessions of this table are kept."))

    def _press(self, _button: ipw.Button) -> None:
        try:
            self._files.replace(read_session(self.earlier.value))
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
            for _, old in _sessions_in(self.path.parent)[:-MOST_KEPT]:
                old.unlink(missing_ok=True)
        except (HeaprLabError, OSError) as error:
            self.earlier.layout.display = self.resume.layout.display = "none"
            self._say(failure(error, what="This session is not kept: "))


def _said_of(when: float, path: Path) -> str:
    """When a session was last changed, and how much there is of it."""
    since = f"{datetime.fromtimestamp(when):%F %T}"
    try:
        saved = read_session(path)
    except (HeaprLabError, OSError):  # of which Resume speaks
        return since
    n_points = sum(point.selection is not None for point in saved.points)
    return f"{since}, {len(saved.pins)} pinned, {n_points} evaluated"


def _sessions_in(folder: Path) -> list[tuple[float, Path]]:
    """When each session was changed [s], and its file; none that is being written."""
    files = []
    for path in folder.glob("[!.]*.json"):
        with contextlib.suppress(FileNotFoundError):  # another panel removed it
            files.append((path.stat().st_mtime, path))
    return sorted(files)
