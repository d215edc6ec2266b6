"""Small HTML cards that notebooks show for the objects of this package.

Colours are JupyterLab's own variables, so that a card follows the theme; elsewhere they
are those of the page, or greys that are readable on any background.
"""

import html
from collections.abc import Mapping

_MUTED = "var(--jp-ui-font-color2, inherit)"
_BORDER = "var(--jp-border-color2, rgba(128, 128, 128, 0.5))"
_TRACK = "var(--jp-layout-color3, rgba(128, 128, 128, 0.3))"
_FILL = "var(--jp-brand-color1, #1976d2)"


def card_html(title: str, facts: Mapping[str, str], *, below: str = "") -> str:
    """A bordered card: title, one line per fact, and further HTML `below`."""
    rows = "".join(
        f'<tr><td style="text-align:left;vertical-align:top;padding-right:1em;'
        f'color:{_MUTED}">{html.escape(name)}</td>'
        '<td style="text-align:left;overflow-wrap:anywhere">'
        f"{html.escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    return (
        f'<div style="display:inline-block;padding:8px 12px;border:1px solid {_BORDER};'
        'border-radius:4px;font-size:13px">'
        f"<strong>{html.escape(title)}</strong>"
        f'<table style="margin:4px 0">{rows}</table>{below}</div>'
    )


def bars_html(caption: str, shares: Mapping[str, float]) -> str:
    """One horizontal bar per entry, its share of the width filled and written out."""
    bars = "".join(
        '<div style="display:flex;align-items:center;gap:6px;line-height:1.2">'
        f'<span style="width:5em;color:{_MUTED}">{html.escape(name)}</span>'
        f'<span style="width:160px;height:8px;background:{_TRACK}">'
        f'<span style="display:block;height:8px;width:{100 * share:.1f}%;'
        f'background:{_FILL}"></span></span><span>{100 * share:.1f} %</span></div>'
        for name, share in shares.items()
    )
    return f'<div style="color:{_MUTED}">{html.escape(caption)}</div>{bars}'
