"""The looks of a panel: its style, names that widgets lack, layouts, pieces of HTML.

Colours follow the theme, and are never the only mark. The rules of its classes are in
`panel.css`. Importing this needs no torch.
"""

import base64
import html
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import anywidget
import ipywidgets as ipw
import pandas as pd
import traitlets

from heapr_lab.errors import HeaprLabError
from heapr_lab.panel.glossary import BUTTONS, TERMS

PANEL: Final = "heapr-panel"
"""The class of a panel, in which names are set."""
STALE = "heapr-stale"
"""What is out of date, and grey."""
PICTURE = "heapr-picture"
"""A chart, drawn dark on white, whose lightness is turned around in a dark theme."""
WHOLE_LABEL: Final = {"description_width": "initial"}
"""Style of a control whose label is longer than ipywidgets allows for."""
MUTED = "var(--jp-ui-font-color2, #555)"
INK = "var(--jp-ui-font-color1, #111)"
BORDER = "var(--jp-border-color2, #bbb)"
_CSS = Path(__file__).with_name("panel.css")
MEASURED = "measured"
"""The word before a number that the model was run for."""
_STYLE = (
    "display:inline-block;padding:0 6px;border-width:1px;border-radius:8px;"
    "font-size:smaller;font-weight:normal;border-style:solid"
)
logger = logging.getLogger(__name__)


class InPage(anywidget.AnyWidget):
    """Does in its panel what ipywidgets does not.

    Pictures have names, and handles those of their sliders, which a screen reader says;
    what is folded is reached and unfolded with keys.
    """

    _esm = Path(__file__).with_name("in_page.js")

    pictures = traitlets.Dict().tag(sync=True)
    """The name of each picture, by a CSS selector."""
    width = traitlets.Int(0).tag(sync=True)
    """The width of the panel in pixels; 0 until it stands in a page."""


def panel_style() -> ipw.HTML:
    """The style of the classes, needed once in a panel."""
    css = _CSS.read_text("utf-8")
    return ipw.HTML(f"<style>{css}</style>", layout={"display": "none"})


def mark_stale(widget: ipw.DOMWidget, stale: bool) -> None:
    """Show a widget grey, or no longer."""
    (widget.add_class if stale else widget.remove_class)(STALE)


# --- widgets --------------------------------------------------------------------------


def picture(kind: str, **layout: str) -> ipw.Image:
    """A chart, whose name is set by `InPage` for its class, heapr-`kind`."""
    image = ipw.Image(format="png", layout=layout)
    image.add_class(PICTURE)
    image.add_class(f"heapr-{kind}")
    return image


def button(
    name: str,
    press: Callable[[ipw.Button], object] = lambda _: None,
    *,
    said: str = "",
    primary: bool = False,
) -> ipw.Button:
    """A button as wide as its name; its tooltip is `said`, or that of the name."""
    told = said or BUTTONS.get(name)
    widget = ipw.Button(description=name, tooltip=told, layout={"width": "auto"})
    widget.button_style = "primary" if primary else ""
    widget.on_click(press)
    return widget


def one_of(name: str, options: Iterable[Any] = (), *, width: str) -> ipw.Dropdown:
    """A list of options of which one is chosen, at first the first."""
    box = ipw.Dropdown(
        options=list(options),
        description=name,
        style=WHOLE_LABEL,
        layout={"width": width, "max_width": "100%"},
    )
    # Of a value None ipywidgets chooses nothing, for some seeds of Python's hashes.
    box.index = 0 if box.options else None
    return box


def line(
    name: str, value: str = "", *, width: str = "300px", hint: str = ""
) -> ipw.Text:
    """A box for one line of text, which is taken when it was typed to its end."""
    return ipw.Text(
        value,
        description=name,
        placeholder=hint,
        continuous_update=False,
        style=WHOLE_LABEL,
        layout={"width": width},
    )


def slider(name: str, value: int, *, most: int, step: int) -> ipw.IntSlider:
    """A slider from 0, which is read when it is let go."""
    return ipw.IntSlider(
        value, 0, most, step, description=name, continuous_update=False,
        style=WHOLE_LABEL,
    )  # fmt: skip


def beside(*parts: ipw.Widget) -> ipw.HBox:
    """Parts next to each other where there is room, else below each other."""
    return ipw.HBox(parts, layout={"flex_flow": "row wrap", "grid_gap": "0 8px"})


def folded(title: str, *parts: ipw.Widget) -> ipw.Accordion:
    """Parts that are one line, their title, until it is clicked."""
    return ipw.Accordion([ipw.VBox(parts)], titles=[title])


class Written(ipw.Accordion):
    """Text that is one line, its title, until it is clicked, and is written only then.

    Attributes:
        text: the text as HTML.
    """

    def __init__(
        self, title: str, write: Callable[[], str], *parts: ipw.Widget
    ) -> None:
        """Nothing is written yet; `parts` stand before what `write` returns."""
        self.text, self._write = ipw.HTML(), write
        content = beside(*parts, self.text) if parts else self.text
        super().__init__([content], titles=[title])
        self.observe(self.refresh, names="selected_index")

    def refresh(self, _change: Any = None) -> None:
        """Write it again, if it is shown."""
        if self.selected_index is not None:
            self.text.value = self._write()


# --- pieces of HTML -------------------------------------------------------------------


def status(text: str, *, before: str = "") -> str:
    """HTML that a screen reader reads aloud when it changes; `before` is HTML."""
    content = f"{before} {html.escape(text)}" if before else html.escape(text)
    return f'<div role="status" aria-live="polite">{content}</div>'


def alert(text: str) -> str:
    """HTML that a screen reader reads aloud at once."""
    color = "var(--jp-error-color1, #b00020)"
    return f'<div role="alert" style="color:{color}">{html.escape(text)}</div>'


def failure(error: Exception, *, what: str = "") -> str:
    """An error as an alert; an unexpected one with its type, and logged in full.

    Args:
        error: one of the system says the file and why, without a number.
        what: what did not happen, which is said before it.
    """
    if isinstance(error, OSError) and error.strerror:
        return alert(f"{what}{error.filename or 'a file'}: {error.strerror.lower()}")
    if isinstance(error, HeaprLabError | OSError):
        return alert(f"{what}{error}")
    logger.error("a panel caught an error", exc_info=error)
    return alert(f"{what}{type(error).__name__}: {error}")


def table_html(frame: pd.DataFrame) -> str:
    """The frame as HTML, with four decimals; wide ones scroll."""
    columns = {name: map(_cell, frame[name]) for name in frame}
    return f'<div style="overflow-x:auto">{columns_html("", columns)}</div>'


def _cell(value: Any) -> str:
    if pd.isna(value):
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else html.escape(str(value))


def columns_html(caption: str, columns: Mapping[str, Iterable[object]]) -> str:
    """A table of these columns, whose cells are HTML."""
    cell = f"text-align:left;padding:2px 12px 2px 0;border-bottom:1px solid {BORDER}"
    head = "".join(
        f'<th scope="col" style="{cell};vertical-align:bottom">{html.escape(name)}</th>'
        for name in columns
    )
    body = "".join(
        "<tr>" + " ".join(f'<td style="{cell}">{value}</td>' for value in row) + "</tr>"
        for row in zip(*columns.values(), strict=True)
    )
    style = f"border-collapse:collapse;color:{INK};line-height:1.5;margin:8px 0"
    muted = f"text-align:left;color:{MUTED}"
    title = f'<caption style="{muted}">{html.escape(caption)}</caption>'
    return (
        f'<table style="{style};font-variant-numeric:tabular-nums">'
        f"{title if caption else ''}<thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def numbers(values: Iterable[float], form: str) -> list[str]:
    """The numbers as text; a dash where there is none."""
    return ["–" if pd.isna(value) else format(value, form) for value in values]


def code_html(code: str) -> str:
    """Code that keeps its lines, with a button that copies it."""
    copies = "navigator.clipboard.writeText(this.nextElementSibling.textContent)"
    look = "white-space:pre-wrap;line-height:1.4"
    font = "font-family:var(--jp-code-font-family, monospace)"
    return (
        f'<button class="jupyter-button" onclick="{copies}">Copy</button>'
        f'<pre tabindex="0" style="{look};{font}">{html.escape(code)}</pre>'
    )


def image_html(png: bytes, name: str) -> str:
    """A picture in the page itself, with its name for those who do not see it."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    return f'<img alt="{html.escape(name)}" style="max-width:100%" src="{source}">'


def badge() -> str:
    """`MEASURED` in a border, with the glossary's sentence as its tooltip; HTML."""
    title = html.escape(TERMS[MEASURED].text)
    return f'<span style="{_STYLE}" title="{title}">{MEASURED}</span>'
