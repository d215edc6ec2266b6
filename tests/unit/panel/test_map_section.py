"""The map follows the selection; it, its boxes, its table and the card are linked."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from html_text import cells
from random_tables import random_table

from heapr_lab.panel.expert_map import kept_share
from heapr_lab.panel.map_section import MapSection
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.weights import WeightRecipe

SHAPE = 2, 4, 16


@pytest.fixture
def opened() -> Explorer:
    """The panel of a table, with the Inspect tab open."""
    panel = explore(random_table(*SHAPE), selection=Selection(ratio=0.4))
    panel.tabs.selected_index = 2
    return panel


def drawn(section: MapSection) -> np.ndarray:
    """The numbers that the browser has, (layers, experts)."""
    return np.frombuffer(section.map.values, "<f4").reshape(SHAPE[:2])


def columns(section: MapSection) -> np.ndarray:
    """The expert in each column, (layers, experts)."""
    return np.frombuffer(section.map.order, "<i4").reshape(SHAPE[:2])


def pin(panel: Explorer) -> None:
    """Pin the current selection, as people do it: in the Compare tab."""
    panel.tabs.selected_index = 3
    panel.comparison.pin()
    panel.tabs.selected_index = 2


def test_each_variable(opened: Explorer) -> None:
    """The numbers are those of the mask, the counts and the scores."""
    section, session = opened.inspection.map, opened.session
    frame = session.table.frame.assign(score=session.table.scores("heapr"))
    by_expert = frame.groupby(["layer", "expert"])
    widths = session.keep.widths().to_numpy(dtype=float)
    expected = {
        "kept share": widths / SHAPE[2],
        "expert load": np.tile(np.arange(10, 14) / 11.5, (2, 1)),
        "score mass": by_expert["score"].sum().to_numpy().reshape(SHAPE[:2]),
    }
    assert section.variable.options[:3] == tuple(expected)
    for variable, values in expected.items():
        section.variable.value = variable
        np.testing.assert_allclose(drawn(section), values, rtol=1e-6)
        assert section.map.title.startswith(variable)
        assert section.map.percent == (variable == "kept share")
    section.variable.value = "kept share"
    opened.controls.slider.value = 80
    assert drawn(section).mean() == pytest.approx(0.2, abs=0.01)
    opened.controls.estimator.value = "random"
    section.variable.value = "score mass"
    assert "random" in section.map.title


def test_hidden_maps_wait(opened: Explorer) -> None:
    """The map costs nothing while another tab is open, and is new when it is opened."""
    section = opened.inspection.map
    before = section.map.values
    opened.tabs.selected_index = 0
    opened.controls.slider.value = 80
    assert section.map.values == before
    opened.tabs.selected_index = 2
    assert section.map.values != before


def test_difference_to_a_pin(opened: Explorer) -> None:
    """Now minus then, around 0; without a pin the map goes, and says what to do."""
    section = opened.inspection.map
    assert section.pin.layout.display == "none"
    section.variable.value = "difference to a pin"
    assert section.pin.layout.display is None
    assert 'role="alert"' in section.note.value
    assert "Pin, in Compare" in section.note.value
    assert section.view.layout.display == "none"
    pin(opened)
    before = opened.session.keep.widths().to_numpy(dtype=float)
    opened.controls.slider.value = 70
    pin(opened)
    assert [name for name, _ in section.pin.options] == ["A", "B"]
    now = opened.session.keep.widths().to_numpy(dtype=float)
    np.testing.assert_allclose(drawn(section), (now - before) / SHAPE[2], atol=1e-7)
    assert section.view.layout.display is None
    assert section.map.low == -section.map.high < 0
    section.pin.index = 1
    assert not drawn(section).any()
    assert "minus that of pin B" in section.map.title
    opened.comparison.clear()
    opened.controls.slider.value = 60
    assert "nothing is pinned" in section.note.value


def test_order(opened: Explorer) -> None:
    """Experts are sorted by the value that is shown, or by load; the table follows."""
    section = opened.inspection.map
    assert columns(section).tolist() == [[0, 1, 2, 3]] * 2
    section.order.value = "by expert load"
    assert columns(section).tolist() == [[3, 2, 1, 0]] * 2
    section.order.value = "by value"
    for variable in ("kept share", "score mass"):
        section.variable.value = variable
        ordered = np.take_along_axis(drawn(section), columns(section), axis=1)
        assert (np.diff(ordered, axis=1) <= 0).all()
        numbers = [int(row[0].strip("▸ ")) for row in cells(section.experts.value)]
        assert numbers == columns(section)[0].tolist()


def test_a_cell_chooses_an_expert(opened: Explorer) -> None:
    """Boxes, table and card are of it; the boxes choose as the map does."""
    section, session = opened.inspection.map, opened.session
    section.map.selected = [1, 2]
    assert (section.layer.value, section.expert.value) == (1, 2)
    kept = session.keep.by_layer(1)[2]
    scores = session.table.scores("heapr").reshape(SHAPE)[1, 2]
    assert f"Layer 1, expert 2: {kept.sum()} of 16 atoms kept" in section.card.value
    assert f"highest pruned score is {scores[~kept].max():.3g}" in section.card.value
    assert f"lowest kept one {scores[kept].min():.3g}" in section.card.value
    assert f"Load {12 / 11.5:.2f} × even share" in section.card.value
    chosen = [row for row in cells(section.experts.value) if "▸" in row[0]]
    total = f"{scores.sum():.3g}"
    assert chosen == [["▸ 2", f"{kept.mean():.1%}", f"{12 / 11.5:.2f}", total]]
    assert "Experts of layer 1" in section.experts.value
    section.layer.value = 0
    assert section.map.selected == [0, 2]
    assert "Layer 0, expert 2" in section.card.value
    opened.controls.slider.value = 0
    assert "None is pruned" in section.card.value


def test_an_infeasible_selection_takes_the_map_away(opened: Explorer) -> None:
    """Choosing an expert then does not bring an old mask back."""
    section = opened.inspection.map
    opened.controls.min_atoms.value = 16
    assert 'role="alert"' in section.note.value
    section.layer.value = 1
    assert section.view.layout.display == "none"
    assert section.card.value == ""
    opened.controls.min_atoms.value = 1
    assert section.view.layout.display is None
    assert "Layer 1, expert 0" in section.card.value


def test_layers_without_this_expert() -> None:
    """A layer that is not there, or has fewer experts, is an alert beside the map."""
    small, large = random_table(1, 2, 4).frame, random_table(1, 4, 4).frame
    frame = pd.concat([small, large.assign(layer=3)], ignore_index=True)
    section = MapSection(PruningSession(type(random_table(1, 2, 4)).from_frame(frame)))
    section.refresh()
    section.map.selected = [3, 3]
    assert "Layer 3, expert 3" in section.card.value
    for layer in (0, 1):
        section.layer.value = layer
        assert f"no expert 3 in layer {layer}" in section.card.value
        assert section.map.selected is None
    section.layer.value = 99
    assert "layer of the expert is 99, expected a whole" in section.card.value
    assert section.view.layout.display is None
    section.layer.value = 3
    assert section.map.selected == [3, 3]


def test_a_mask_that_is_not_known_yet_is_not_shown(opened: Explorer) -> None:
    """No other is shown in its place; it appears once the weights have chosen it."""
    section, session = opened.inspection.map, opened.session
    recipe = WeightRecipe("compress")
    chosen = session.keep_of(replace(session.selection, estimator="random"))
    session.recipe = recipe
    section.refresh()
    assert "not known yet: compress chooses" in section.note.value
    assert section.view.layout.display == "none"
    session._chosen[session.selection, recipe] = chosen
    section.refresh()
    assert section.note.value == ""
    assert (section._drawn == kept_share(session.table, chosen)).all()


def test_table_without_tokens() -> None:
    """Where tokens were not counted there is no load to show or to sort by."""
    frame = random_table(*SHAPE).frame
    table = type(random_table(1, 1, 1)).from_frame(
        frame.assign(sum_h2=1.0).drop(columns=["tokens"])
    )
    section = MapSection(PruningSession(table))
    assert "expert load" not in section.variable.options
    assert "by expert load" not in section.order.options
