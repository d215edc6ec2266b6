"""The sessions of panels: each is kept in the cache as it changes, and offered later.

Every panel that is displayed has a file of its own. A panel of the same table and test
data offers the last one; nothing is shown unasked, so that a notebook does not depend
on what somebody did before. With `$HEAPR_LAB_RESUME=0` none is kept or offered.
"""

import os
import uuid
from datetime import datetime
from pathlib import Path
from typing import Final

import ipywidgets as ipw

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.panel.jobs import Debounced, alert, said_of, status
from heapr_lab.panel.session_bar import SessionBar
from heapr_lab.panel.session_file import read_session, write_session
from heapr_lab.storage.cache import cache_path

VARIABLE: Final = "HEAPR_LAB_RESUME"
KIND: Final = "sessions"
"""Folder in the cache, with a folder for each table and its test data."""
SECONDS: Final = 1.0
"""From the last change to the file: moves must not wait for it."""
MOST_KEPT: Final = 8
"""Sessions of one table; the oldest are removed."""


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
            files: which has the state of the panel, and can show another.
        """
        self._files = files
        self._shown = False
        self._soon = Debounced(self.write, SECONDS)
        self.path = None if os.environ.get(VARIABLE) == "0" else _path_of(files)
        self.earlier = None if self.path is None else _last_in(self.path.parent)
        self.message = ipw.HTML()
        self.resume = ipw.Button(
            description="Resume",
            tooltip="show the pins, evaluations and settings of that session",
        )
        self.resume.on_click(self._press)
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
            self._say(alert(f"The session cannot be shown: {said_of(error)}"))
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
            self._say(alert(f"This session is not kept: {said_of(error)}"))


def _path_of(files: SessionBar) -> Path:
    folder = cache_path(KIND, files.place(), extension="json").with_suffix("")
    return folder / f"{uuid.uuid4().hex}.json"


def _sessions_in(folder: Path) -> list[Path]:
    """The files of sessions, the last one last."""
    return sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)


def _last_in(folder: Path) -> Path | None:
    return next(reversed(_sessions_in(folder)), None)
