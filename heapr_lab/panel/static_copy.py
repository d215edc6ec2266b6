"""What a saved notebook shows of a panel without its kernel: a picture, and numbers.

JupyterLab shows a widget while the kernel that made it runs, and afterwards an error in
its place, whatever else that output has. So the copy is an output of its own, below the
widget's. A style inside the widget hides it: where the widget is not shown, nor is its
style in the page, and the copy is seen.
"""

import html
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
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

    def __init__(self, bundle: Callable[[], Mapping[str, str]]) -> None:
        """Nothing is displayed yet.

        Args:
            bundle: what to show now, as `copy_bundle` makes it.
        """
        self._bundle = bundle
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
        display(self._named(), raw=True, display_id=self._name)
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
                display(self._named(), raw=True, display_id=self._name, update=True)

    def _named(self) -> dict[str, str]:
        """The bundle, its HTML in an element of the class that the panel hides."""
        bundle = dict(self._bundle())
        names = f"{CLASS} {CLASS}-{self._name}"
        bundle["text/html"] = f'<div class="{names}">{bundle["text/html"]}</div>'
        return bundle


def copy_bundle(
    title: str, *, views: Sequence[str | bytes], text: str
) -> dict[str, str]:
    """A copy by media type: HTML, which holds its pictures, and plain text.

    Args:
        title: what is shown, in a line.
        views: HTML, or pictures as PNG, from top to bottom; empty ones are left out.
        text: the same numbers as plain text.
    """
    shown = [image_html(v, title) if isinstance(v, bytes) else v for v in views if v]
    heading = f"<p><b>{html.escape(title)}</b></p>"
    body = "".join([heading, *shown, f"<p><small>{_NOTE}</small></p>"])
    plain = "\n".join(part for part in (title, text, _NOTE) if part)
    return {"text/html": body, "text/plain": plain}
