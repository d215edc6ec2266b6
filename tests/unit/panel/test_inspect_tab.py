"""The tab that inspects a text, without a browser."""

import ipywidgets as ipw
import numpy as np
import pandas as pd
import pytest
from html_text import cells, marked
from pressing import cancel, failed, press
from random_tables import random_table

from heapr_lab.importance.columns import KEYS
from heapr_lab.inspection.activations import routing
from heapr_lab.inspection.attribution import attribute_loss, attribute_token
from heapr_lab.inspection.passages import Passage, read_passage, token_losses
from heapr_lab.panel import inspect_tab
from heapr_lab.panel.glossary import widgets_in
from heapr_lab.panel.inspect_tab import InspectTab, nearest_the_cut
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection

OF_TEXT = ("generate", "compare", "route", "attribute", "explain")
"""The jobs that read the text."""


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


def test_nearest_the_cut():
    """The removed atoms of the highest scores, as sorting them all finds them."""
    table = random_table(2, 3, 5)
    kept = np.random.default_rng(0).random((2, 3, 5)) < 0.5
    keep = KeepMask.from_arrays(dict(enumerate(kept)))
    every = table.frame[[*KEYS]].assign(score=table.score("heapr"))[~keep.rows]
    expected = every.sort_values("score", ascending=False, ignore_index=True)
    for n in (6, 99):
        nearest = nearest_the_cut(table, keep, estimator="heapr", n=n)
        pd.testing.assert_frame_equal(nearest, expected.head(n), check_dtype=False)
    assert nearest_the_cut(table, KeepMask.full(table), estimator="heapr").empty


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


def test_tab_shows_routing(tab, bench, passage):
    """The routing is that of the token and the layer that were asked for."""
    tab.layer.value, tab.position.value = 1, 6
    press(tab.route)
    pd.testing.assert_frame_equal(tab.routes, routing(bench.model, passage))
    routes = tab.routes.query("layer == 1 and position == 6")
    rows = cells(tab.route.value)
    assert [int(row[0]) for row in rows[:2]] == routes["expert"].tolist()
    assert [int(row[1]) for row in rows[2:]] == tab.atoms["atom"].tolist()
    assert marked(tab.route.value) == [passage.tokens[6].replace("<", "&lt;")]


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


def test_explain(tab, bench, passage):
    """The pruned atoms of the token below, and what its experts have together."""
    tab.layer.value, tab.position.value = 1, 4
    press(tab.explain)
    expected = attribute_token(
        bench.model, tab.session.keep, passage.ids, layer=1, position=4
    )
    pd.testing.assert_frame_equal(tab.shares, expected)
    rows = cells(tab.explain.value)
    atoms = [row for row in rows if len(row) == 5]
    assert [int(row[1]) for row in atoms] == expected["atom"].head(20).tolist()
    by_expert = expected.groupby("expert")["first_order"].sum()
    experts = [row for row in rows if len(row) == 4]
    assert {int(row[0]): row[3] for row in experts} == {
        expert: f"{1000 * value:+.3f}" for expert, value in by_expert.items()
    }
    assert len(marked(tab.explain.value)) == 1


def test_positions_are_those_of_the_text(tab):
    """One beyond the end stays as typed, and is refused; a longer text has more."""
    tab.text.value = "abcdef"
    tab.position.value = 17
    assert "17, expected a whole number from 0 to 5" in failed(tab.route)
    tab.text.value = "abcdef" * 3
    press(tab.route)
    tab.position.value = 1


def test_tab_shows_contexts(tab, bench):
    """The atom is the one nearest the cut, the windows are those of calibration."""
    keep = tab.session.keep
    assert tab.nearest.value == ()
    tab.nearest.index = 1
    best = nearest_the_cut(tab.session.table, keep, estimator="heapr").iloc[0]
    boxes = tab.atom_layer.value, tab.expert.value, tab.atom.value
    assert boxes == (best["layer"], best["expert"], best["atom"])
    press(tab.show_contexts)
    rows = cells(tab.show_contexts.value)
    assert len(rows) == len(tab.contexts) > 0
    places = tab.contexts[["window", "position"]].astype(str).agg(":".join, axis=1)
    assert [row[2] for row in rows] == places.tolist()
    windows = bench.calibration_set(tab.session.calibration).ids
    for row in tab.contexts.itertuples():
        token = bench.tokenizer.decode(windows[row.window, row.position])
        assert row.token == token
    assert ": pruned; masked model" in tab.show_contexts.value
    assert "8 windows" in tab.show_contexts.value


def test_atoms_follow_the_choice(tab):
    """Another choice has other atoms near its cut; none, and one that fails, say so."""
    before = tab.nearest.options
    assert len(before) == 1 + 20
    tab.session.choose(Selection(ratio=0.8))
    tab.refresh()
    assert tab.nearest.options != before
    tab.session.choose(Selection(ratio=0.0))
    tab.refresh()
    assert [name for name, _ in tab.nearest.options] == ["none: nothing is pruned"]
    tab.session.choose(Selection(0.5, exclude_layers=(99,)))
    tab.refresh()
    assert tab.nearest.value == ()
    assert "no routed experts in layers 99" in tab.note.value
    tab.session.choose(Selection(ratio=0.5))
    tab.refresh()
    assert tab.note.value == ""
    assert tab.nearest.options == before


def test_long_texts_are_clipped(tab, monkeypatch):
    """What is not read is told: the end of a text, the beginning of a prompt."""
    monkeypatch.setattr(inspect_tab, "_LONGEST", 10)
    tab.text.value = "abcdefghijklmnop"
    press(tab.compare)
    assert "6 tokens at its end are left out" in tab.compare.value
    press(tab.generate)
    assert "11 tokens at its beginning are left out" in tab.generate.value
    assert "lmnop" in tab.generate.value


@pytest.mark.parametrize("name", OF_TEXT)
def test_errors_stand_in_the_tab(tab, name):
    """No text: the message is an alert below the button, which works again."""
    job = getattr(tab, name)
    press(job)
    tab.text.value = ""
    assert "no tokens" in failed(job)
    assert job.value == ""
    assert not job.button.disabled


@pytest.mark.parametrize("name", [*OF_TEXT, "show_contexts"])
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
