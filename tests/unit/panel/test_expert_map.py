"""The map of experts hands its numbers on, without asking another machine."""

from typing import Any

import numpy as np

from heapr_lab.panel.expert_map import ExpertMap

VALUES = np.array([[0.0, 0.5, 1.0], [0.25, 0.75, np.nan]])
"""Values of two layers, the second with one expert fewer."""
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


def test_before_anything_is_shown() -> None:
    """Printing it works."""
    assert "empty" in repr(ExpertMap())


def test_it_asks_no_other_machine() -> None:
    """The browser gets the whole script and style; they load nothing."""
    script, style = str(ExpertMap._esm), str(ExpertMap._css)
    assert "export default" in script
    for text in (script, style):
        assert not any(word in text for word in ("http", "import ", "import(", "url("))
