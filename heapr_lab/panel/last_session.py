"""The last session of a panel: kept in the cache as it changes, shown when it opens.

With `$HEAPR_LAB_RESUME=0` none is kept or shown, as for notebooks that are run to be
published: those must not depend on what somebody did before.
"""

import contextlib
import os
from datetime import datetime
from pathlib import Path
from typing import Final

import ipywidgets as ipw
from msgspec import structs

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.panel.jobs import Debounced, alert, status
from heapr_lab.panel.session_bar import SessionBar
from heapr_lab.panel.session_file import SavedSession, read_session, write_session
from heapr_lab.pruning.options import Selection
from heapr_lab.storage.cache import cache_path

VARIABLE: Final = "HEAPR_LAB_RESUME"
KIND: Final = "sessions"
"""Folder in the cache."""
SECONDS: Final = 1.0
"""From the last change to the file: moves must not wait for it."""


class LastSession(ipw.HBox):
    """Keeps the state of a displayed panel; says if an earlier one is shown.

    Attributes:
        path: the file of this table and these test data; None if none is kept.
        message: what was opened, or why not.
        afresh: the button that shows the state without the last session.
    """

    def __init__(self, files: SessionBar) -> None:
        """Show nothing; a person sees it only if an earlier session is opened.

        Args:
            files: which has the state of the panel, and can show another.
        """
        self._files = files
        self._first: SavedSession | None = None
        self._shown = False
        self._soon = Debounced(self.write, SECONDS)
        self.path = None if os.environ.get(VARIABLE) == "0" else _path_of(files)
        self.message = ipw.HTML()
        self.afresh = ipw.Button(
            description="Start afresh",
            tooltip="remove the pins, evaluations and settings of the last session; "
            "results stay in the cache",
        )
        self.afresh.on_click(self._press_afresh)
        layout = {"flex_flow": "row wrap", "display": "none"}
        super().__init__([self.message, self.afresh], layout=layout)

    def resume(self, selection: Selection | None = None) -> None:
        """Show the last session, if there is one.

        Args:
            selection: shown in place of the one that was saved.
        """
        if self.path is None or not self.path.is_file():
            return
        try:
            since = datetime.fromtimestamp(self.path.stat().st_mtime)
            first, saved = self._files.saved(), read_session(self.path)
            chosen = selection or saved.selection
            self._files.restore(structs.replace(saved, selection=chosen))
        except (HeaprLabError, OSError) as error:
            self._set_aside(self.path, error)
            return
        self._first = first
        self.layout.display = None
        self.message.value = status(
            f"The last session of this table is shown, of {since:%Y-%m-%d %H:%M}."
        )

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
        except (HeaprLabError, OSError) as error:
            self._warn(f"This session is not kept: {error}")

    def _set_aside(self, path: Path, why: Exception) -> None:
        """Rename a file that cannot be shown, or the next change would replace it."""
        aside = path.with_suffix(".aside.json")
        with contextlib.suppress(OSError):
            path.replace(aside)
        self._warn(f"The last session cannot be shown, it is now {aside}: {why}")

    def _warn(self, text: str) -> None:
        self.layout.display, self.afresh.layout.display = None, "none"
        self.message.value = alert(text)

    def _press_afresh(self, _button: ipw.Button) -> None:
        assert self._first is not None  # or there is no button
        self._files.restore(self._first)
        self.layout.display = "none"
        self.changed()


def _path_of(files: SessionBar) -> Path:
    return cache_path(KIND, files.place(), extension="json")
