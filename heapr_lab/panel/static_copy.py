"""What a saved notebook shows of a panel without its kernel: a picture, and numbers.

JupyterLab shows a widget while the kernel that made it runs, and afterwards an error in
its place, whatever else that output has. So the copy is an output of its own, below the
widget's. A style inside the widget hides it: where the widget is not shown, nor is its
style in the page, and the copy is seen.
"""

import html
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Final

import ipywidgets as ipw
from IPython.core.getipython import get_ipython
from IPython.display import display

from heapr_lab.panel.jobs import Debounced
from heapr_lab.panel.looks import image_html

CLASS: Final = "heapr-copy"
"""CSS class of every copy; each has another one, of its panel alone."""
_WIDGET = "A panel, which needs a running kernel; a copy is below."
_NOTE = "A copy of the panel without its controls; to use it, run the notebook."


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
