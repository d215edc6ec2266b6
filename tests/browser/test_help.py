"""The panel says what it is of, what its words mean, and what may be overlooked."""

import pytest
from browser.pages import panels

from heapr_lab.panel.glossary import TERMS

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.browser


def test_the_header_stands_above_the_controls(page):
    """It names the model, and what else the panel is of."""
    panel, _ = panels(page)
    header = panel.root.get_by_role("note", name="what this panel is of")
    expect(header).to_contain_text("model moe, ")
    above, below = header.bounding_box(), panel.ratio.bounding_box()
    assert above is not None
    assert below is not None
    assert above["y"] + above["height"] <= below["y"]


def test_the_help_has_every_term(page):
    """It opens with a click, and each control has its sentence."""
    panel, _ = panels(page)
    title = panel.root.get_by_text("Help: what each control and term means")
    title.click()
    names = panel.root.get_by_role("term").get_by_text("ragged", exact=True)
    expect(names).to_be_visible()
    title.click()
    for name in ("ratio", "scope", "estimator", "structure", "layers not pruned"):
        title = panel.root.locator(f"label [title]:text-is('{name}')").first
        assert TERMS[name].text in str(title.get_attribute("title"))
