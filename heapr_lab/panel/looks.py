"""The looks of a panel that widgets have no traits for: classes, style, badges."""

import base64
import html

import ipywidgets as ipw

from heapr_lab.panel.glossary import TERMS

STALE = "heapr-stale"
"""What is out of date, and grey."""
PICTURE = "heapr-picture"
"""A chart, drawn dark on white, whose lightness is turned around in a dark theme."""

_DARK = ('[data-jp-theme-light="false"]', ".vscode-dark")
"""How JupyterLab and Voilà, and VS Code, mark a page with a dark theme."""
_TITLES = ", ".join(
    f".heapr-panel {part}"
    for part in (".jupyter-widget-Collapse-header span", ".lm-TabBar-tabLabel")
)
_LEGIBLE = "color: var(--jp-ui-font-color1)"
"""Those of ipywidgets are grey on grey, a contrast below 4.5."""
_TURNED = "invert(0.88) hue-rotate(180deg)"
_GREY = "opacity: 0.35; filter: grayscale(1)"
MEASURED = "measured"
"""The word before a number that the model was run for."""
_STYLE = (
    "display:inline-block;padding:0 6px;border-width:1px;border-radius:8px;"
    "font-size:smaller;font-weight:normal;border-style:solid"
)


def panel_style() -> ipw.HTML:
    """The style of the classes, needed once in a panel.

    Turning hues back after the inversion leaves blue blue and orange orange; white
    becomes the grey of the page.
    """
    rules = [f".{STALE} {{{_GREY}}}", f"{_TITLES} {{{_LEGIBLE}}}"]
    for dark in _DARK:
        rules.append(f"{dark} .{PICTURE} {{filter: {_TURNED}}}")
        rules.append(f"{dark} .{PICTURE}.{STALE} {{{_GREY} {_TURNED}}}")
    return ipw.HTML(f"<style>{' '.join(rules)}</style>", layout={"display": "none"})


def picture(kind: str, **layout: str) -> ipw.Image:
    """A chart, whose name is set by `accessible_names` for its class, heapr-`kind`."""
    image = ipw.Image(format="png", layout=layout)
    image.add_class(PICTURE)
    image.add_class(f"heapr-{kind}")
    return image


def beside(*parts: ipw.Widget) -> ipw.HBox:
    """Parts next to each other where there is room, else below each other."""
    return ipw.HBox(parts, layout={"flex_flow": "row wrap", "grid_gap": "0 8px"})


def folded(title: str, *parts: ipw.Widget) -> ipw.Accordion:
    """Parts that are one line, their title, until it is clicked."""
    return ipw.Accordion([ipw.VBox(parts)], titles=[title])


def code_html(code: str) -> str:
    """Code that keeps its lines, with a button that copies it."""
    copies = "navigator.clipboard.writeText(this.nextElementSibling.textContent)"
    style = 'tabindex="0" style="white-space:pre-wrap"'
    return (
        f'<button type="button" onclick="{copies}">Copy</button>'
        f"<pre {style}>{html.escape(code)}</pre>"
    )


def image_html(png: bytes, name: str, *, css: str = "") -> str:
    """A picture in the page itself, with its name for those who do not see it."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    return (
        f'<img class="{css}" alt="{html.escape(name)}" style="max-width:100%" '
        f'src="{source}">'
    )


def badge() -> str:
    """`MEASURED` in a border, with the glossary's sentence as its tooltip; HTML."""
    title = html.escape(TERMS[MEASURED].text)
    return f'<span style="{_STYLE}" title="{title}">{MEASURED}</span>'
