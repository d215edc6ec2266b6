"""Badges that say where a number comes from: it was measured, or it is predicted.

They differ by their word and their border, and their colour is that of the text.
"""

import html
from typing import Literal, TypeAlias

from heapr_lab.panel.glossary import TERMS

Kind: TypeAlias = Literal["measured", "predicted"]
_BORDERS = {"measured": "solid", "predicted": "dashed"}
_STYLE = (
    "display:inline-block;padding:0 6px;border-width:1px;border-radius:8px;"
    "font-size:smaller;font-weight:normal;border-style:"
)


def badge(kind: Kind) -> str:
    """The word in a border, as HTML; its tooltip is that of the glossary."""
    title = html.escape(TERMS[kind].text)
    return f'<span style="{_STYLE}{_BORDERS[kind]}" title="{title}">{kind}</span>'
