"""The map of experts hands its numbers on, and says which expert is chosen."""

from typing import Any

import numpy as np
import pytest

from heapr_lab.errors import SpecError
from heapr_lab.panel.expert_map import ExpertMap

VALUES = np.array([[0.0, 0.5, 1.0], [0.25, 0.75, np.nan]])
"""Of two layers, the second with one expert fewer."""
ASKED: dict[str, Any] = {
    "values": VALUES,
    "layers": [1, 4],
    "title": "t",
    "limits": (0, 1),
}


def shown(**changes: Any) -> ExpertMap:
    """The map of VALUES, shown with some arguments changed."""
    picture = ExpertMap()
    picture.show(**ASKED | changes)
    return picture


def test_what_the_browser_gets() -> None:
    """Numbers row by row, and the expert in each column, little-endian."""
    picture = shown(percent=True)
    assert np.frombuffer(picture.values, "<f4").tolist()[:5] == [0, 0.5, 1, 0.25, 0.75]
    assert np.isnan(np.frombuffer(picture.values, "<f4")[5])
    assert np.frombuffer(picture.order, "<i4").tolist() == [0, 1, 2, 0, 1, 2]
    assert (picture.layers, picture.n_columns) == ([1, 4], 3)
    assert (picture.low, picture.high, picture.percent) == (0.0, 1.0, True)
    assert not picture.ranked


def test_order() -> None:
    """Each row has its own; values stay as the experts are numbered."""
    plain, sorted_ = shown(), shown(order=[[2, 1, 0], [1, 0, 2]])
    assert np.frombuffer(sorted_.order, "<i4").tolist() == [2, 1, 0, 1, 0, 2]
    assert sorted_.values == plain.values
    assert sorted_.ranked


@pytest.mark.parametrize("place", [[0, 0], [1, 3], [4, 2], [4, -1], [4], [1, 1, 1]])
def test_an_expert_that_is_not_there(place: list[int]) -> None:
    """Layers by their index, not their row; a layer may have fewer experts."""
    picture = shown()
    with pytest.raises(SpecError, match="the layers 1, 4"):
        picture.selected = place
    assert picture.selected is None


def test_the_chosen_expert_stays_chosen() -> None:
    """Other numbers and another order keep it; it goes if it is no longer there."""
    picture = shown()
    picture.selected = [1, 2]
    other = {"values": 1 - VALUES, "order": np.array([[2, 0, 1], [2, 0, 1]])}
    picture.show(**ASKED | other)
    assert picture.selected == [1, 2]
    picture.show(**ASKED | {"values": VALUES[:, :2]})
    assert picture.selected is None


def test_before_anything_is_shown() -> None:
    """Nothing can be chosen, and printing it works."""
    picture = ExpertMap()
    assert "empty" in repr(picture)
    with pytest.raises(SpecError):
        picture.selected = [0, 0]


def test_it_asks_no_other_machine() -> None:
    """The browser gets the whole script and style; they load nothing."""
    script, style = str(ExpertMap._esm), str(ExpertMap._css)
    assert "export default" in script
    for text in (script, style):
        assert not any(word in text for word in ("http", "import ", "import(", "url("))
