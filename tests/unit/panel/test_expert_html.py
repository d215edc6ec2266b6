"""The histogram of an expert has every atom, and the cut where the scores say."""

import re

import numpy as np
import pytest

from heapr_lab.panel.map_section import expert_html

_BAR = re.compile(r'<rect x="([\d.]+)"[^>]* height="([\d.]+)" style="fill:([^"]*)"')
_CUT = re.compile(r'<line x1="([\d.]+)"[^>]*stroke-dasharray')
HEIGHT = 150
"""Pixels of the highest bar."""


def drawn(scores: np.ndarray, kept: np.ndarray) -> str:
    """The page of one expert."""
    return expert_html("E", scores, kept, facts="", unit="nats")


def test_histogram() -> None:
    """Heights count the atoms, pruned and kept; pruned ones end at the cut."""
    scores = np.random.default_rng(0).lognormal(0, 2, 500)
    kept = scores > np.quantile(scores, 0.3)
    page = drawn(scores, kept)
    bars = [(float(x), float(high), color) for x, high, color in _BAR.findall(page)]
    most = re.search(r"at most (\d+) in a bar", page)
    assert most is not None
    tall, counts = HEIGHT / int(most[1]), []
    for removed in (True, False):
        heights = [high for _, high, color in bars if ("213,94,0" in color) == removed]
        counts.append(sum(heights) / tall)
    assert counts == pytest.approx([(~kept).sum(), kept.sum()], rel=0.01)
    (cut,) = map(float, _CUT.findall(page))
    logs = np.log(scores)
    share = (logs[~kept].max() - logs.min()) / np.ptp(logs)
    assert cut / 440 == pytest.approx(share, abs=0.03)  # the axis ends a little later
    assert max(x for x, _, color in bars if "213,94,0" in color) <= cut
    assert f"{kept.sum()} of 500 atoms kept" in page


@pytest.mark.parametrize(
    ("kept", "said", "cuts"),
    [
        ([True] * 3, "None is pruned; its lowest score is 0", 0),
        ([False, True, True], "highest pruned score is 0, its lowest kept one 1", 0),
        ([False, False, True], "highest pruned score is 1, its lowest kept one 2", 1),
        ([False] * 3, "highest pruned score is 2.", 1),
    ],
)
def test_the_cut(kept: list[bool], said: str, cuts: int) -> None:
    """It is drawn where it is on the axis; a score of 0 is counted, not drawn."""
    page = drawn(np.array([0.0, 1, 2]), np.array(kept))
    assert said in page
    assert len(_CUT.findall(page)) == cuts
    assert "Not drawn: 1 with a score of 0 or less" in page


def test_an_expert_without_scores() -> None:
    """No token reached it: there is a sentence and no picture."""
    page = drawn(np.zeros(3), np.array([True, False, False]))
    assert "No score is above 0" in page
    assert "<svg" not in page
