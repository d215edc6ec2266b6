"""The state of a panel in one JSON file, and the bar that saves and opens it.

A file is checked whole when it is read, and never evaluated.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import ipywidgets as ipw
import msgspec
import numpy as np
import pandas as pd

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance.estimators import ESTIMATORS, find_estimator
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.controls import Controls
from heapr_lab.panel.looks import beside, button, failure, line, status
from heapr_lab.panel.session import POINT_COLUMNS, Pin, Point, PruningSession
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.weights import MASKED, WeightRecipe
from heapr_lab.storage.cache import cache_path
from heapr_lab.storage.files import replacing
from heapr_lab.storage.hashing import without_nan
from heapr_lab.storage.paths import path_of
from heapr_lab.text.calibration_spec import Calibration

KIND: Final = "heapr-lab panel session"
VERSION: Final = 4
"""Increased whenever files of an older version can no longer be read."""


class Inspected(msgspec.Struct, frozen=True):
    """What is kept of the Inspect tab; earlier files have numbers, too."""

    text: str


class Tests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of the test data of points, as in `Profile`."""

    seq_len: int
    n_test: int | None
    n_items: int


class MethodRow(msgspec.Struct, frozen=True):
    """What the row of a method must have; all else that it has is numbers."""

    label: str
    method: str
    achieved_ratio: float | None


class SavedSession(msgspec.Struct, frozen=True):
    """What a session file has."""

    kind: Literal["heapr-lab panel session"]
    version: Literal[4]
    table: str
    """The `fingerprint_of` the table that selections and points are of; in earlier
    files, its `spec_hash`."""
    measured_for: str
    """An estimator; where it needs an extra pass, the table has its scores."""
    tests: Tests | None
    """None without a model."""
    texts: dict[str, str]
    """Hash of the test data of each corpus and task of the points, and of the corpora
    of methods, where known."""
    calibration: Calibration
    selection: Selection
    recipe: WeightRecipe = msgspec.field(name="way")
    """How weights are made."""
    pins: tuple[Pin, ...]
    points: tuple[Point, ...]
    inspected: Inspected | None
    """None without a model."""
    methods: tuple[dict[str, str | float | None], ...] = ()
    """Rows of the methods that were run, each a `MethodRow` with savings and losses."""

    def __post_init__(self) -> None:
        find_estimator(self.measured_for)
        for recipe in (self.recipe, *(pin.recipe for pin in self.pins)):
            if recipe.own_text > 1:
                raise SpecError(
                    f"own_text is {recipe.own_text}, expected a share from 0 to 1"
                )
        dense = {
            (point.dataset, point.accuracy is None)
            for point in self.points
            if point.selection is None
        }
        for point in self.points:
            if (point.dataset, point.accuracy is None) not in dense:
                raise SpecError(
                    f"it has no point of the dense model on {point.dataset}, which "
                    "the pruned ones are compared with"
                )

    def frame(self) -> pd.DataFrame:
        """The points as `PruningSession` has them: NaN where nothing was measured."""
        rows = [
            {k: v for k, v in msgspec.structs.asdict(point).items() if v is not None}
            for point in self.points
        ]
        frame = pd.DataFrame(rows, columns=list(POINT_COLUMNS))
        return frame.assign(selection=[point.selection for point in self.points])


def points_of(frame: pd.DataFrame) -> tuple[Point, ...]:
    """The rows of points as Python's own numbers; None for those that are not finite.

    Args:
        frame: as `PruningSession.points`.
    """
    return tuple(Point(**row) for row in without_nan(frame.to_dict("records")))


# --- files ----------------------------------------------------------------------------


def write_session(path: Path | str, saved: SavedSession) -> None:
    """Write `saved` to a file, which is replaced only if it is a session, too.

    Raises:
        SpecError: there is another file or a folder of this name, or a value is not
            plain data.
    """
    path = Path(path)
    if path.is_dir():
        raise SpecError(f"{path} is a folder, expected the name of a file")
    if path.exists():
        read_session(path)
    try:
        data = msgspec.json.encode(saved)
        same = msgspec.json.decode(data, type=SavedSession) == saved
    except (TypeError, msgspec.ValidationError):
        same = False
    if not same:
        raise SpecError(
            f"{saved.selection!r}, or the selection of a pin, has a value that a file "
            "would change: give decimals"
        )
    with replacing(path) as temporary:
        temporary.write_bytes(msgspec.json.format(data) + b"\n")


def read_session(path: Path | str) -> SavedSession:
    """The state in a file of `write_session`.

    Raises:
        SpecError: there is no such file, it is another one, of another version, or a
            part of it is missing or wrong, or unknown where that matters.
    """
    path = path_of(path)
    if not path.is_file():
        raise SpecError(f"there is no session {path}; save one in the panel")
    data = path.read_bytes()
    try:
        saved = msgspec.json.decode(data, type=SavedSession)
        _check_known(msgspec.json.decode(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecError(
            f"{path} is no session of the panel, or one of another heapr_lab: {error}"
        ) from error
    return saved


def _check_known(plain: Mapping[str, Any]) -> None:
    """Check that nothing is unknown in what determines masks, weights and losses.

    Raises:
        SpecError, TypeError, msgspec.ValidationError: something is, or wrong.
    """
    Calibration.from_dict(plain["calibration"])
    for part in (plain, *plain["pins"], *plain["points"]):
        if part["selection"] is not None:
            Selection.from_dict(part["selection"])
        if "way" in part:
            WeightRecipe(**part["way"])
    for row in plain.get("methods", ()):
        msgspec.convert(row, MethodRow)
        numbers = {name: row[name] for name in row.keys() - {"label", "method"}}
        msgspec.convert(numbers, dict[str, float | None])


# --- tables ---------------------------------------------------------------------------


def fingerprint_of(table: ImportanceTable) -> str:
    """What tells tables apart: the hash of what was measured, and of all numbers."""
    return table.memo("fingerprint", lambda: _hash_of(table))


def is_as_measured(table: ImportanceTable) -> bool:
    """Whether the cache has the same numbers for what the table says was measured."""
    return table.memo("is as measured", lambda: _is_cached(table))


def _is_cached(table: ImportanceTable) -> bool:
    spec = table.metadata.get("spec", {})
    path = cache_path("importance", spec, extension="parquet")
    try:
        return fingerprint_of(ImportanceTable.read(path)) == fingerprint_of(table)
    except (CacheError, OSError):
        return False


def _hash_of(table: ImportanceTable) -> str:
    sha = hashlib.sha256(str(table.metadata.get("spec_hash", "")).encode())
    frame = table.frame
    for name in sorted(frame.columns):
        sha.update(f"{name} {frame[name].dtype} ".encode())
        sha.update(np.ascontiguousarray(frame[name]).tobytes())
    return sha.hexdigest()


# --- the bar --------------------------------------------------------------------------


class SessionBar(ipw.VBox):
    """A file name, a button that saves and one that opens, and what came of it."""

    def __init__(self, panel: Any) -> None:
        """Lay the bar out.

        Args:
            panel: the `Explorer` whose state is saved, and which shows another again.
        """
        self._panel = panel
        self._session: PruningSession = panel.session
        self._opened: SavedSession | None = None
        self._undo: Callable[[], object] = lambda: None
        self.file = line("session file", "session.json")
        self.save_button = button(
            "Save session", lambda _: self._tried(self._save, "Saved to {}")
        )
        self.open_button = button(
            "Open session", lambda _: self._tried(self._open, "Opened {}")
        )
        back = "go back to the previous session, or file; once more comes back here"
        self.undo_button = button(
            "Undo", lambda _: self._tried(self._undo, "Undone"), said=back
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
        session, opened = self._session, self._opened
        tests, recipe, inspected = self._tests(), session.recipe, None
        if session.workbench is not None:
            inspected = Inspected(self._panel.inspection.text.value)
        elif opened is not None:  # what only a model can use is passed on
            tests, recipe, inspected = opened.tests, opened.recipe, opened.inspected
        return SavedSession(
            KIND,
            VERSION,
            fingerprint_of(session.table),
            _measured_for(session),
            tests,
            session.texts,
            session.calibration,
            session.selection,
            recipe,
            tuple(self._panel.comparison.pins),
            points_of(session.points),
            inspected,
            tuple(without_nan(session.method_rows)),
        )

    def _tests(self) -> Tests | None:
        bench = self._session.workbench
        if bench is None:
            return None
        profile = bench.profile
        return Tests(profile.seq_len, profile.n_test, profile.n_items)

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
        self._session.texts = saved.texts
        self._session.points = saved.frame()  # after their texts: tabs show them now
        methods = list(map(dict, saved.methods))
        self._panel.comparison.show_pins(list(saved.pins), methods)
        if self._session.workbench is not None:
            self._panel.weights.show(saved.recipe)
            if saved.inspected is not None:
                self._panel.inspection.text.value = saved.inspected.text
        self._panel.controls.show(fresh)
        self._opened = saved
        self._panel.show_again()

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

    def _save(self) -> None:
        path, saved = path_of(self.file.value), self.saved()
        self._write(path, lambda: write_session(path, saved))

    def _write(self, path: Path, write: Callable[[], object]) -> None:
        """Write a file, with a button that brings back what it was, if it was there."""
        before = path.read_bytes() if path.is_file() else None
        write()
        if before is not None:
            back = functools.partial(path.write_bytes, before)
            self._offer_undo(lambda: self._write(path, back))

    def _open(self) -> None:
        self.replace(read_session(self.file.value))

    def _offer_undo(self, undo: Callable[[], object]) -> None:
        self._undo, self.undo_button.layout.display = undo, None

    def _tried(self, work: Callable[[], object], done: str) -> None:
        try:
            work()
        except Exception as error:  # an exception of a button is not shown
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
