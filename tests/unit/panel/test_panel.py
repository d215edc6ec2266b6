"""The panel follows its controls, and says what it shows."""

from fractions import Fraction
from unittest.mock import Mock

import pytest
from random_tables import random_table, small_table

from heapr_lab.errors import SpecError
from heapr_lab.panel.answer import layers_frame
from heapr_lab.panel.opening import explore
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select


def test_panel_follows_the_slider(monkeypatch):
    """Moving the slider moves the box, and changes text and picture, once each time."""
    panel = explore(small_table())
    draw = Mock(wraps=panel._picture.draw)
    monkeypatch.setattr(panel._picture, "draw", draw)
    before = (panel.status.value, bytes(panel.picture.value))
    assert "4 of 16" not in before[0]
    panel.controls.slider.value = 75
    assert panel.controls.ratio.value == "0.75"
    assert panel.session.keep.n_kept == 4
    assert "4 of 16 kept" in panel.status.value
    assert 'role="status"' in panel.status.value
    assert bytes(panel.picture.value).startswith(b"\x89PNG")
    assert bytes(panel.picture.value) != before[1]
    panel.controls.ratio.value = "0.25"
    assert (panel.status.value, bytes(panel.picture.value)) == before
    assert [call.args[0].achieved_ratio for call in draw.mock_calls] == [0.75, 0.25]


def test_controls_of_structure_budget_and_constraints():
    """Widths, what the ratio counts, minimum atoms and layers that are not pruned."""
    panel = explore(random_table(2, 4, 16), selection=Selection(ratio=0.3))
    controls = panel.controls
    assert controls.multiple.disabled
    controls.structure.value = "aligned"
    assert not controls.multiple.disabled
    controls.multiple.value = 4
    assert set(panel.session.keep.widths().to_numpy().ravel()) <= {0, 4, 8, 12, 16}
    controls.structure.value = "ragged"
    controls.min_atoms.value = 3
    controls.excluded.value = "1"
    assert panel.session.keep.by_layer(1).all()
    assert panel.session.keep.widths().loc[0].min() >= 3
    assert panel.session.selection.exclude_layers == (1,)
    controls.excluded.value = "one"
    assert "cannot read" in panel.error.value
    controls.excluded.value = ""
    for typed in (3.7, 17, -1):  # neither rounded nor moved to what is allowed
        controls.min_atoms.value = typed
        assert controls.min_atoms.value == typed
        message = f"min atoms per expert is {typed:g}, expected a whole number from 0"
        assert message in panel.error.value
    controls.min_atoms.value = 0
    controls.ratio.value = "0.2"
    controls.budget.value = "parameters (model)"
    assert panel.error.value == ""
    saved = panel.session.savings()
    assert 0.2 <= saved["parameter_reduction"] < 0.22


def test_panel_offers_the_estimators_of_the_table():
    """Estimators whose columns, or whose N, are missing are not offered."""
    offered = explore(small_table()).controls.estimator.options
    names = {"heapr", "camera", "frequency", "random"}
    assert set(offered) == names


def test_the_numbers_of_the_picture_are_one_click_away():
    """A row for each layer, made while it is open, and following the slider then."""
    panel = explore(random_table(2, 4, 16), selection=Selection(ratio=0.5))
    assert panel.behind.text.value == ""
    panel.behind.selected_index = 0
    frame = layers_frame(panel.session)
    widths = panel.session.keep.widths()
    assert frame["narrowest"].tolist() == widths.min(axis=1).tolist()
    assert frame["experts gone"].tolist() == (widths == 0).sum(axis=1).tolist()
    assert frame["busiest [× even share]"].tolist() == ["1.13", "1.13"]  # 13 / 11.5
    before = panel.behind.text.value
    assert all(share in before for share in frame["removed"])
    panel.controls.slider.value = 25
    assert panel.behind.text.value != before


def test_anything_else_cannot_be_explored():
    """A list has neither a table nor a model."""
    with pytest.raises(SpecError, match="cannot explore a list"):
        explore([])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "selection",
    [
        Selection(Fraction(1, 3)),
        Selection(0.5, "camera", scope="layer", estimator_options={"alpha": 0.0}),
        Selection(0.5, "elimination"),
    ],
)
def test_no_other_selection_is_shown_than_was_given(selection):
    """What has no control, or no columns in the table, is refused."""
    with pytest.raises(SpecError, match="the panel would show"):
        explore(small_table(), selection=selection)


@pytest.mark.parametrize(
    "selection",
    [Selection(1 / 3), Selection(1e-5), Selection(0.5, structure="per_layer")],
)
def test_a_selection_with_controls_is_shown(selection):
    """To the last digit; widths that need not be multiples are multiples of 1."""
    table = random_table(2, 4, 16)
    panel = explore(table, selection=selection)
    assert panel.session.keep == select(table, selection)
    assert panel.session.selection.ratio == selection.ratio


def test_another_estimator_is_named():
    """Camera locks the scope and says why; leaving it restores the scope."""
    panel = explore(small_table())
    assert "Estimator" not in panel.status.value
    scope = panel.controls.scope
    panel.controls.estimator.value = "camera"
    assert (scope.value, scope.disabled) == ("layer", True)
    assert "compares atoms within a layer only" in panel.status.value
    panel.controls.estimator.value = "frequency"
    assert (scope.value, scope.disabled) == ("global", False)
    assert "Estimator: frequency." in panel.status.value


def test_panel_text_is_the_same_each_time():
    """What a notebook keeps of the panel names its choice and no object's number."""
    panel = explore(small_table(), selection=Selection(ratio=0.4))
    assert repr(panel).startswith("Explorer(heapr, 0.4 of the atoms, global scope")
