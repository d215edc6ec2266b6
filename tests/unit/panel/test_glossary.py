"""The glossary has each word once, and its page is made of it."""

import pages

from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.panel.glossary import GLOSSARY, TERMS, find_term
from heapr_lab.pruning.options import CHOICES
from heapr_lab.recipes.weights import WEIGHTS

ALL = [term for terms in GLOSSARY.values() for term in terms]


def test_no_word_is_explained_twice():
    """A control would show the last of two terms; but for plurals."""
    names = [name for term in ALL for name in (term.name, *term.labels)]
    assert len(names) == len(set(names)) == len(TERMS)


def test_every_word_of_a_selection_is_a_term():
    """Estimators in their own words, fields of a few words, and ways of weights."""
    for name, estimator in ESTIMATORS.items():
        assert estimator.description[1:] in TERMS[name].text
    words = {word for name in CHOICES if name != "of" for word in CHOICES[name]}
    assert words | set(WEIGHTS) <= TERMS.keys()


def test_terms_are_found_by_the_label_of_a_control():
    """With the unit that stands on it."""
    assert find_term("heal [windows]") is TERMS["heal"]
    assert find_term("nothing of the kind") is None


def test_the_page_has_every_term():
    """Under its heading, with the page that says more."""
    text = pages.glossary_page()
    assert all(f"* **{term.name}**: {term.text}" in text for term in ALL)
    assert all(f"## {heading}\n" in text for heading in GLOSSARY)
