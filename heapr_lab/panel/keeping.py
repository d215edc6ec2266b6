"""What is kept of a displayed panel: its session in the cache, and a copy for readers.

Every panel that is displayed has a file of its own in the cache. A panel of the same
table and test data offers the earlier ones; nothing is shown unasked, so that a
notebook does not depend on what somebody did before. With `$HEAPR_LAB_RESUME=0` none is
kept or offered.

A saved notebook shows a picture, and numbers, without its kernel. JupyterLab shows a
widget while the kernel that made it runs, and afterwards an error in its place,
whatever else that output has. So the copy is an output of its own, below the widget's.
A style inside the widget hides it: where the widget is not shown, nor is its style in
the page, and the copy is seen.
"""

import contextlib
import html
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import ipywidgets as ipw
from IPython.core.getipython import get_ipython
from IPython.display import display

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.panel.jobs import Debounced
from heapr_lab.panel.looks import button, failure, image_html, one_of, status
from heapr_lab.panel.session_file import SessionBar, read_session, write_session
from heapr_lab.storage.cache import cache_path

VARIABLE: Final = "HEAPR_LAB_RESUME"
KEPT: Final = "sessions"
"""Folder in the cache, with a folder for each table and its test data."""
MOST_KEPT: Final = 8
"""Sessions of one table; the oldest are removed."""
CLASS: Final = "heapr-copy"
"""CSS class of every copy; each has another one, of its panel alone."""
_WIDGET = "A panel, which needs a running kernel; a copy is below."
_NOTE = "A copy of the panel without its controls; to use it, run the notebook."


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
        self.resume = button("Resume", self._press)
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
        except Exception as error:  # an exception of a button is not shown
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


# --- in the notebook ------------------------------------------------------------------


class StaticCopy:
    """The copy of one panel: displayed with it, and updated as the panel changes.

    Attributes:
        hides: the style that hides the copy; a child of the panel.
    """

    def __init__(
        self, copied: Callable[[], tuple[str, Sequence[str | memoryview], str]]
    ) -> None:
        """Nothing is displayed yet.

        Args:
            copied: what to show now, in a line; HTML, or pictures as PNG, from top to
                bottom, of which empty ones are left out; and the numbers as plain text.
        """
        self._copied = copied
        self._name = uuid.uuid4().hex
        self._shown = self._stale = False
        self._soon = Debounced(self.update)
        self._publishing = threading.Lock()
        style = f"<style>.{CLASS}-{self._name} {{display: none}}</style>"
        self.hides = ipw.HTML(style, layout={"display": "none"})

    def show(self, panel: ipw.DOMWidget) -> None:
        """Display `panel`, and the copy below it."""
        widget = panel._repr_mimebundle_() | {"text/plain": _WIDGET}
        display(widget, raw=True)
        display(self._media(), raw=True, display_id=self._name)
        self._shown = True
        shell = get_ipython()
        if shell is not None:
            # At the end of a cell, so that equal runs leave equal notebooks.
            shell.events.register("post_run_cell", self.update)

    def changed(self) -> None:
        """Have the copy updated at the end of the cell; soon, if none is running."""
        if self._shown:
            self._stale = True
            self._soon.again()

    def update(self, _result: object = None) -> None:
        """Update the copy in the notebook, if the panel has changed."""
        with self._publishing:  # or an older copy could follow a newer one
            if self._stale:
                self._stale = False
                display(self._media(), raw=True, display_id=self._name, update=True)

    def _media(self) -> dict[str, str]:
        """The copy by media type: HTML of the class that the panel hides, and text."""
        title, views, text = self._copied()
        shown = [
            view if isinstance(view, str) else image_html(bytes(view), title)
            for view in views
            if view
        ]
        heading, note = f"<p><b>{html.escape(title)}</b></p>", f"<small>{_NOTE}</small>"
        body = "".join([heading, *shown, f"<p>{note}</p>"])
        page = f'<div class="{CLASS} {CLASS}-{self._name}">{body}</div>'
        plain = "\n".join(part for part in (title, text, _NOTE) if part)
        return {"text/html": page, "text/plain": plain}
