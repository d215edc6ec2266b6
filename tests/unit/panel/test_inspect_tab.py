"""The tab that inspects a text, without a browser."""

import ipywidgets as ipw
import numpy as np
import pytest
from html_text import cells, marked
from pressing import cancel, failed, press

from heapr_lab.inspection.attribution import attribute_loss
from heapr_lab.inspection.passages import Passage, read_passage, token_losses
from heapr_lab.panel import inspect_tab
from heapr_lab.panel.glossary import widgets_in
from heapr_lab.panel.inspect_tab import InspectTab
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.options import Selection

JOBS = ("generate", "compare", "attribute")


@pytest.fixture
def tab(session) -> InspectTab:
    """The tab that inspects, with a short text, half of the model pruned."""
    session.choose(Selection(ratio=0.5))
    tab = InspectTab(session)
    tab.text.value = "the <b>other</b> & 漢"
    tab.n_tokens.value = 5
    return tab


@pytest.fixture
def passage(tab, bench) -> Passage:
    """The text of the tab."""
    return read_passage(bench.model, bench.tokenizer, text=tab.text.value)


def test_tab_of_a_table_alone(session):
    """Without a model text says that one is needed."""
    tab = InspectTab(PruningSession(session.table))
    tab.refresh()
    assert [c for c in widgets_in(tab) if isinstance(c, ipw.Button)] == []
    (said,) = tab.children
    assert "open_workbench" in said.value
    assert 'role="status"' in said.value


def test_tab_can_be_printed(tab):
    """No name of the tab stands in the way of one of ipywidgets'."""
    assert "InspectTab" in repr(tab)


def test_tab_generates(tab):
    """Dense and pruned side by side, from the text as it was read."""
    press(tab.generate)
    dense, pruned = tab.continuations
    assert len(dense) == len(pruned) == 5
    assert dense["token_id"].tolist() != pruned["token_id"].tolist()
    page = tab.generate.value
    assert page.count("the &lt;b&gt;other&lt;/b&gt; &amp; 漢") == 2
    assert "50.0% of the atoms removed" in page
    assert len(marked(page)) == 2


def test_attribute(tab, bench, passage):
    """The layers add up to what is said, beside the measured change; then the map."""
    press(tab.attribute)
    model, keep = bench.model, tab.session.keep
    expected = attribute_loss(model, keep, passage.ids)
    np.testing.assert_array_equal(tab.attribution.tokens, expected.tokens)
    page, n_layers = tab.attribute.value, expected.tokens.shape[1]
    assert f"add up to {expected.total:+.4f} nats" in page
    losses = token_losses(model, passage, keep=keep)
    assert f"measured, Δ is {losses['delta_nll'].mean():+.4f}" in page
    rows = cells(page)
    assert len(rows) == n_layers + passage.ids.shape[1]
    assert rows[n_layers + 3][3] == f"{1000 * expected.tokens[3, 0]:+.2f}"


def test_long_texts_are_clipped(tab, monkeypatch):
    """What is not read is told: the end of a text, the beginning of a prompt."""
    monkeypatch.setattr(inspect_tab, "_LONGEST", 10)
    tab.text.value = "abcdefghijklmnop"
    press(tab.compare)
    assert "6 tokens at its end are left out" in tab.compare.value
    press(tab.generate)
    assert "11 tokens at its beginning are left out" in tab.generate.value
    assert "lmnop" in tab.generate.value


@pytest.mark.parametrize("name", JOBS)
def test_errors_stand_in_the_tab(tab, name):
    """No text: the message is an alert below the button, which works again."""
    job = getattr(tab, name)
    press(job)
    tab.text.value = ""
    assert "no tokens" in failed(job)
    assert job.value == ""
    assert not job.button.disabled


@pytest.mark.parametrize("name", JOBS)
def test_cancel(tab, name):
    """Each ends at its next report; nothing is shown, and all is ready again."""
    cancel(getattr(tab, name))
    assert getattr(tab, name).value == ""


def test_two_at_once(tab):
    """Comparing while generating gives what each gives alone."""
    press(tab.generate)
    press(tab.compare)
    alone = tab.generate.value, tab.compare.value
    for _ in range(3):
        for shown in (tab.generate, tab.compare):
            shown.clear()
        tab.generate.button.click()
        tab.compare.button.click()
        tab.generate.wait(60)
        tab.compare.wait(60)
        assert (tab.generate.value, tab.compare.value) == alone
