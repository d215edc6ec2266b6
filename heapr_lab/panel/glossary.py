"""The glossary, and the tooltip of each control. Without torch.

Its terms are those of `glossary.toml`, and the estimators.
"""

import html
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets as ipw

from heapr_lab.importance.estimators import ESTIMATORS, Estimator

_UNIT = re.compile(r"\s*\[[^]]*\]$")
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_EXPLAINED = re.compile(r'<span title="[^"]*">(.*)</span>', re.DOTALL)


@dataclass(frozen=True)
class Term:
    """A word, and what it means."""

    name: str
    text: str
    """Plain English, whole sentences."""
    page: str = ""
    """The page of `docs` that says more; empty if there is none."""
    paper: str = ""
    """Where the paper has it."""
    labels: tuple[str, ...] = ()
    """What else stands on controls and in lists that it explains."""


def _term(name: str, *, text: str, labels: Iterable[str] = (), **more: str) -> Term:
    return Term(name, " ".join(text.split()), **more, labels=tuple(labels))


def _estimator(estimator: Estimator) -> Term:
    first, rest = estimator.description[0], estimator.description[1:]
    limits = " Scores are compared within a layer only." * estimator.within_layer
    text = f"An estimator. {first.upper()}{rest}; in {estimator.unit}.{limits}"
    paper = "HEAPr, Algorithm 1, equations 15 and 16" * (estimator.name == "heapr")
    return Term(estimator.name, text, "method.md", paper)


BUTTONS: dict[str, str] = _DATA.pop("buttons")
"""What each button does, by its name."""
GLOSSARY = {
    heading: [_term(name, **fields) for name, fields in terms.items()]
    for heading, terms in _DATA.items()
}
"""The terms by the heading they stand under."""
GLOSSARY["Scores"] += map(_estimator, ESTIMATORS.values())
TERMS = {
    name: term
    for terms in GLOSSARY.values()
    for term in terms
    for name in (term.name, *term.labels)
}
"""The terms by their names and by the labels they explain."""


def find_term(label: str) -> Term | None:
    """The term that explains what stands on a control; None if there is none.

    Example:
        >>> find_term("own text [%]").name
        'own text'
    """
    return TERMS.get(_UNIT.sub("", label))


# --- in the panel ---------------------------------------------------------------------


def terms_html() -> str:
    """The terms by heading, as HTML."""
    sections = []
    for heading, terms in GLOSSARY.items():
        rows = "".join(map(_row, terms))
        sections.append(f"<h4>{html.escape(heading)}</h4><dl>{rows}</dl>")
    return "".join(sections)


def _row(term: Term) -> str:
    name, text = html.escape(term.name), html.escape(term.text)
    where = f" <i>{html.escape(term.paper)}</i>" if term.paper else ""
    return f"<dt><b>{name}</b></dt><dd>{text}{where}</dd>"


def widgets_in(widget: ipw.Widget) -> Iterator[ipw.Widget]:
    """A widget and every one in it, however deep."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from widgets_in(child)


def add_tooltips(panel: ipw.Widget) -> None:
    """Explain each control in `panel` that takes a value, and the options of lists.

    The label carries the text: ipywidgets 8 does not show the tooltip of a list, a box
    or a checkbox that has a label.
    """
    for control in widgets_in(panel):
        term = find_term(label_of(control))
        if term is not None and not isinstance(control, ipw.Button):
            control.tooltip = _tooltip(term, getattr(control, "options", ()))
            control.description_allow_html = True
            title, label = map(html.escape, (control.tooltip, label_of(control)))
            control.description = f'<span title="{title}">{label}</span>'


def label_of(control: ipw.Widget) -> str:
    """What stands on a control; empty if it has no label."""
    text = getattr(control, "description", "")
    match = _EXPLAINED.fullmatch(text)
    return text if match is None else html.unescape(match[1])


def _tooltip(term: Term, options: Any) -> str:
    """What a control is, and a line for each of its options that is a term."""
    named = [option if isinstance(option, str) else option[-1] for option in options]
    terms = [(name, find_term(name)) for name in named if isinstance(name, str)]
    lines = [f"{name}: {known.text}" for name, known in terms if known is not None]
    return "\n".join([term.text, *lines])
