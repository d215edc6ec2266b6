"""The glossary has each word once, and its page is made of it."""

import os
import re

import pytest

from heapr_lab.experiments.readme import fill_blocks
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.pruning.options import CHOICES
from heapr_lab.storage import paths
from heapr_lab.workbench.glossary import (
    GLOSSARY,
    TERMS,
    find_term,
    glossary_page,
    search_terms,
)
from heapr_lab.workbench.presets import WEIGHTS

PAGE = paths.project_dir() / "docs" / "glossary.md"
ALL = [term for terms in GLOSSARY.values() for term in terms]


def test_no_word_is_explained_twice() -> None:
    """By two terms, of which a control would have shown the last; but for plurals."""
    names = [name for term in ALL for name in (term.name, *term.labels)]
    assert len(names) == len(set(names)) == len(TERMS)


@pytest.mark.parametrize("term", ALL, ids=lambda term: str(term.name))
def test_each_term_is_said_in_whole_sentences(term: object) -> None:
    """One or two, or for an estimator three, which end with a full stop."""
    text = term.text  # type: ignore[attr-defined]
    assert re.fullmatch(r"[A-ZΔ½e].{15,}\.", text)
    assert len(text) <= 300
    assert text.count(". ") <= 2


def test_every_word_of_a_selection_is_a_term() -> None:
    """Estimators in their own words, fields of a few words, and ways of weights."""
    for name, estimator in ESTIMATORS.items():
        assert estimator.description[1:] in TERMS[name].text
    words = {word for name in CHOICES if name != "of" for word in CHOICES[name]}
    assert words | set(WEIGHTS) <= TERMS.keys()


def test_terms_are_found_by_their_words() -> None:
    """All of them, in any order and case; by the unit on a control as well."""
    found = [
        (heading, term.name) for heading, term in search_terms("notebook's STATE panel")
    ]
    assert found == [("Compare, and files", "session file")]
    assert [term for _, term in search_terms("")] == ALL
    assert list(search_terms("shrunk zebra")) == []
    assert find_term("distil [steps]") is TERMS["distil"]
    assert find_term("nothing of the kind") is None


def test_the_page_has_every_term() -> None:
    """HEAPR_UPDATE_README=1 writes the page anew."""
    listed = {"terms": f"\n{glossary_page()}"}
    if os.environ.get("HEAPR_UPDATE_README") == "1":
        fill_blocks(PAGE, listed)
    text = PAGE.read_text("utf-8")
    assert f"<!-- terms -->{listed['terms']}<!-- end -->" in text
    assert all(f"* **{term.name}**: {term.text}" in text for term in ALL)


def test_the_pages_it_names_are_there() -> None:
    """Each is a file of docs."""
    pages = {term.page for term in ALL if term.page}
    assert [page for page in pages if not (PAGE.parent / page).is_file()] == []
