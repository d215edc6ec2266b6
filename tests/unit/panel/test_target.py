"""A target loss is met by the largest ratio that was measured to be within it."""

from typing import Any

import numpy as np
import pytest
from pressing import panel_on, press
from random_tables import random_table, small_table
from tiny_folder import write_text

from heapr_lab.evaluation.perplexity import Perplexity
from heapr_lab.panel.controls import TARGET
from heapr_lab.panel.opening import explore
from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.pictures import figure_points
from heapr_lab.panel.session import PruningSession
from heapr_lab.panel.sweep import SEARCH
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.recipes import making

DENSE_NLL = 3.0
RISE = 0.16
"""Δloss at a ratio of 0.4 of the model whose Δloss is the square of the ratio."""


@pytest.fixture
def panel(bench, root, monkeypatch) -> Explorer:
    """A panel of a model whose Δloss is the square of the achieved ratio."""
    session = PruningSession(random_table(2, 4, 100), workbench=bench)

    def perplexity(keep: KeepMask | None, _windows: Any, **_: Any) -> Perplexity:
        nll = DENSE_NLL + (0 if keep is None else keep.achieved_ratio**2)
        return Perplexity(value=np.exp(nll), nll=nll, n_tokens=100)

    monkeypatch.setattr(bench, "perplexity", perplexity)
    # The table has enough atoms for whole per cent, and the model has not.
    monkeypatch.setattr(making, "check_table", lambda *_: None)
    corpora = (str(root / "text.txt"), str(write_text(root / "other.txt")))
    panel = panel_on(session, corpora)
    panel.controls.rise.value = RISE
    panel.controls.budget.value = TARGET
    return panel


def ratios(panel: Explorer) -> list[float]:
    """The ratios with a point."""
    points = panel.session.points
    return list(points.loc[points["estimator"].ne("dense"), "ratio"])


def test_a_target_is_searched_for_by_measuring(panel):
    """The largest within it, of whole per cent; all points are said and drawn."""
    assert f"press {SEARCH}" in panel.error.value
    assert "infeasible" in panel.status.value
    assert panel.controls.ratio.disabled
    panel.tabs.selected_index = 1
    press(panel.search)
    assert panel.error.value == ""
    assert panel.session.selection.ratio == pytest.approx(0.4, abs=0.011)
    assert panel.session.keep.achieved_ratio**2 <= RISE
    assert 3 <= len(ratios(panel)) <= 7
    for ratio in ratios(panel):
        assert f"{ratio:.0%} {ratio**2:+.4g}" in panel.status.value
    panel.controls.budget.value = "atoms"
    assert panel.controls.ratio.value == "0.25"  # as before there was a target
    (ax,) = figure_points(panel.session.points).axes
    (curve,) = ax.get_lines()
    assert len(curve.get_xdata()) == 1 + len(ratios(panel))


def test_a_search_goes_on_from_what_was_measured(panel):
    """Again nothing is run; for another target only what is missing."""
    press(panel.search)
    first = ratios(panel)
    press(panel.search)
    assert ratios(panel) == first
    panel.controls.rise.value = RISE / 4
    shown = panel.session.selection.ratio  # the largest that is known to be within it
    assert shown == max((ratio for ratio in first if ratio**2 <= RISE / 4), default=0)
    press(panel.search)
    assert panel.session.selection.ratio == pytest.approx(0.2, abs=0.011)
    assert set(first) < set(ratios(panel))


@pytest.mark.parametrize("change", ["corpus", "weights", "scope"])
def test_a_ratio_is_of_what_it_was_measured_for(panel, change):
    """Another corpus, other weights or another scope have no ratio yet."""
    press(panel.search)
    assert panel.error.value == ""
    corpora = panel.evaluation.corpora
    control, value = {
        "corpus": (corpora, corpora.options[1:]),
        "weights": (panel.weights.weights, "compensated"),
        "scope": (panel.controls.scope, "layer"),
    }[change]
    control.value = value
    assert f"press {SEARCH}" in panel.error.value


def test_the_search_is_offered_where_it_can_be_used(panel):
    """It needs a target and a model; a table alone says why there is none."""
    assert panel.search.layout.display is None
    panel.controls.budget.value = "atoms"
    assert panel.search.layout.display == "none"
    assert "at most" not in panel.status.value
    table = explore(small_table())
    table.controls.budget.value = TARGET
    assert "no model" in table.error.value
    assert table.search.layout.display == "none"


def test_ratios_that_cannot_be_selected_are_not_tried(panel):
    """With at least half of the atoms in each expert, half is the most."""
    panel.controls.min_atoms.value = 50
    panel.controls.rise.value = 1.0
    press(panel.search)
    assert ratios(panel) == [0.5]
    assert panel.session.selection.ratio == 0.5


@pytest.mark.parametrize("typed", [20.0, -3.0])
def test_a_target_out_of_range_stays_and_is_an_error(typed):
    """Neither moved to what is allowed, nor searched for."""
    panel = explore(small_table())
    panel.controls.rise.value = typed
    panel.controls.budget.value = TARGET
    assert panel.controls.rise.value == typed
    assert f"must be a number in [0, 10], got {typed}" in panel.error.value


def test_a_target_that_nothing_meets_prunes_nothing(panel):
    """The ratio is 0, and what was measured is said."""
    panel.controls.rise.value = 0.0
    press(panel.search)
    assert panel.session.selection.ratio == 0
    assert "Measured: 95%" in panel.status.value
