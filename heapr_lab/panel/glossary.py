"""The glossary: the terms of `glossary.toml`, and the estimators. Without torch."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from heapr_lab.importance.estimators import ESTIMATORS, Estimator

_UNIT = re.compile(r"\s*\[[^]]*\]$")
_DATA = Path(__file__).with_suffix(".toml")


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


def _estimator(found: Estimator) -> Term:
    first, rest = found.description[0], found.description[1:]
    limits = " Scores are compared within a layer only." * found.within_layer
    text = f"An estimator. {first.upper()}{rest}; in {found.unit}.{limits}"
    paper = "HEAPr, Algorithm 1, equations 15 and 16" * (found.name == "heapr")
    return Term(found.name, text, "method.md", paper)


GLOSSARY = {
    heading: [_term(name, **fields) for name, fields in terms.items()]
    for heading, terms in tomllib.loads(_DATA.read_text("utf-8")).items()
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


def search_terms(words: str) -> Iterator[tuple[str, Term]]:
    """Heading and term of each that has all `words`, in any case, in name or text.

    Example:
        >>> [term.name for _, term in search_terms("WIDTH all layer")]
        ['per_layer']
    """
    asked = words.casefold().split()
    for heading, terms in GLOSSARY.items():
        for term in terms:
            whole = " ".join((term.name, *term.labels, term.text)).casefold()
            if all(word in whole for word in asked):
                yield heading, term
