"""Each control is explained in the words of the glossary, which has each once."""

import html
from typing import Any

import ipywidgets as ipw
import pages
from random_tables import small_table

from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.panel.controls import NumberBox
from heapr_lab.panel.glossary import (
    GLOSSARY,
    TERMS,
    find_term,
    label_of,
    widgets_in,
)
from heapr_lab.panel.opening import explore
from heapr_lab.panel.panel import Explorer

OF_VALUES = (
    *(ipw.Text, ipw.Textarea, ipw.FloatText, NumberBox),
    *(ipw.IntSlider, ipw.Checkbox, ipw.Dropdown, ipw.SelectMultiple),
)
"""The kinds of controls of the panel that take a value."""
ALL = [term for terms in GLOSSARY.values() for term in terms]


def those_of(panel: Explorer, *kinds: type) -> list[Any]:
    """The widgets of some kinds in a panel."""
    return [widget for widget in widgets_in(panel) if isinstance(widget, kinds)]


def test_every_control_has_a_sentence_of_help(panel):
    """It is that of the term on it; a button's sentence says more than its name."""
    controls = those_of(panel, *OF_VALUES)
    assert len(controls) > 25
    for control in controls:
        term = find_term(label_of(control))
        assert term is not None, control.description
        assert control.tooltip.startswith(term.text)
        assert f'title="{html.escape(term.text)}' in control.description
    buttons = those_of(panel, ipw.Button)
    assert len(buttons) > 20
    for button in buttons:
        assert len((button.tooltip or "").split()) >= 3, button.description
        assert button.description not in ("", button.tooltip)


def test_no_control_is_of_another_kind(panel):
    """All that has a name and a value is among those that the test above looks at."""
    shown = (ipw.HTML, ipw.Image, ipw.FloatProgress)
    valued = [w for w in widgets_in(panel) if w.has_trait("value")]
    others = [w for w in valued if not isinstance(w, (*OF_VALUES, *shown))]
    assert others == []


def test_every_option_of_every_list_is_a_term(panel):
    """It stands in the list's tooltip."""
    lists = those_of(panel, ipw.Dropdown)
    assert {"estimator", "scope", "granularity", "structure", "budget"} <= {
        label_of(box) for box in lists
    }
    for box in lists:
        values = [one if isinstance(one, str) else one[-1] for one in box.options]
        for value in values:
            assert f"{value}: {TERMS[value].text}" in box.tooltip


def test_the_help_is_written_when_it_is_opened():
    """It has every term."""
    panel = explore(small_table())
    assert panel.help.text.value == ""
    panel.help.selected_index = 0
    text = panel.help.text.value
    assert text.count("<dt>") == len(ALL)
    assert "½ · mean h²" in text
    assert "<b>ragged</b>" in text


# --- the glossary ---------------------------------------------------------------------


def test_no_word_is_explained_twice():
    """A control would show the last of two terms; but for plurals."""
    names = [name for term in ALL for name in (term.name, *term.labels)]
    assert len(names) == len(set(names)) == len(TERMS)


def test_every_estimator_is_a_term():
    """In its own words."""
    for name, estimator in ESTIMATORS.items():
        assert estimator.description[1:] in TERMS[name].text


def test_the_page_has_every_term():
    """Under its heading, with the page that says more."""
    text = pages.glossary_page()
    assert all(f"* **{term.name}**: {term.text}" in text for term in ALL)
    assert all(f"## {heading}\n" in text for heading in GLOSSARY)
