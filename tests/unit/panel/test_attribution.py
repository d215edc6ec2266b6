"""Why pruning hurts a text, in the tab that inspects it."""

import numpy as np
import pandas as pd
from html_text import cells, marked
from pressing import press

from heapr_lab.inspection.attribution import attribute_loss, attribute_token
from heapr_lab.inspection.passages import token_losses
from heapr_lab.panel import passage_html as views

PRUNED = "half of <it>"


def test_attribute(tab, bench, passage):
    """The layers add up to what is said, beside the measured change; then the map."""
    press(tab.attribute)
    expected = attribute_loss(bench.model, tab.session.keep, passage.ids)
    attribution = tab.attribution
    np.testing.assert_array_equal(attribution.tokens, expected.tokens)
    rows = cells(tab.attribute.value)
    layers = expected.layers()
    n_layers = len(layers)
    assert [row[2] for row in rows[:n_layers]] == [
        f"{value:+.4f}" for value in layers["first_order"]
    ]
    page = tab.attribute.value
    assert f"add up to {expected.total:+.4f} nats" in page
    losses = token_losses(bench.model, passage, keep=tab.session.keep)
    assert f"measured, Δ is {losses['delta_nll'].mean():+.4f}" in page
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


# --- the views ----------------------------------------------------------------------


def layers_of(*values: float) -> pd.DataFrame:
    """A frame of `Attribution.layers`."""
    numbers = range(1, 1 + len(values))
    return pd.DataFrame({"layer": numbers, "n_removed": 5, "first_order": values})


def test_map_shows_the_most(monkeypatch):
    """Rows are in the order of the text; the rest is one row, so columns add up."""
    monkeypatch.setattr(views, "_N_TOKENS", 2)
    tokens = np.array([[0.001, 0.0], [-0.008, 0.001], [0.0, 0.0005], [0.0, 0.002]])
    page = views.attribution_html(
        layers_of(-0.007, 0.0035), tokens, ["<a", "b\n", "c", ""],
        change=0.25, pruned=PRUNED,
    )  # fmt: skip
    assert cells(page)[2:] == [
        ["1", "b↵", "-7.00", "-8.00", "+1.00"],
        ["3", "▯", "+2.00", "+0.00", "+2.00"],
        ["–", "2 others", "+1.50", "+1.00", "+0.50"],
    ]
    assert "add up to -0.0035 nats per token; measured, Δ is +0.2500" in page
    assert "half of &lt;it&gt;" in page
    assert 'role="region" tabindex="0" aria-label=' in page
    assert "2 tokens of 4" in page


def test_map_differs_by_more_than_colour():
    """Each step of a share of the largest has a thicker line, dotted where better."""
    tokens = np.array([[1.0, -0.5, 0.3, -0.2, 0.1]])
    page = views._map([0, 1, 2, 3, 4], tokens, ["a"])
    lines = [part.split(" rgb")[0] for part in page.split("border-bottom:")[1:]]
    drawn = [line for line in lines if line[1:3] == "px" and "var" not in line]
    assert drawn == ["3px solid", "3px dotted", "2px solid", "1px dotted"]
    nothing = views._map([0], np.zeros((1, 1)), ["a"])
    assert "px solid rgb" not in nothing
