"""One switch of the weights: what is evaluated is what is exported."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from html_text import cells
from pressing import cancel, evaluate, export, held, panel_on, press

from heapr_lab.checkpoints import folder as folders
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.inspection.passages import token_losses
from heapr_lab.panel.answer import answers
from heapr_lab.panel.jobs import CancelledError
from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session import POINT_COLUMNS, PruningSession
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes import making
from heapr_lab.recipes.weights import DEFAULT, MASKED, METHODS, WeightRecipe
from heapr_lab.storage.files import read_json
from heapr_lab.streaming.opening import load_like


def last_point(panel: Explorer) -> dict[str, Any]:
    """The newest point of the session."""
    return dict(panel.session.points.iloc[-1])


def test_what_waits_for_weights_can_be_cancelled(panel, tmp_path):
    """Export does not wait to the end of Evaluate, which makes the same."""
    panel.controls.ratio.value, panel.weights.weights.value = "0.43", "compress"
    job, panel.export.folder.value = panel.export.job, str(tmp_path / "pruned")
    with held(panel.evaluation.job, "in all"):
        cancel(job, "another tab")
        assert not job.running
    assert panel.evaluation.job.error.value == ""


def test_the_mask_of_the_first_weights_is_known(session, panel):
    """Others have a share of self-generated text; a table alone has no switch."""
    assert session.recipe == MASKED
    assert panel.weights.weights.layout.display is None
    panel.weights.weights.value = "compress"
    assert session.recipe == WeightRecipe("compress", METHODS[DEFAULT].recipe.own_text)
    alone = Explorer(PruningSession(session.table))
    assert alone.session.recipe == MASKED
    assert alone.weights.weights.layout.display == "none"


def test_another_panel_of_the_session_does_not_choose(session):
    """What the switch and Evaluate of one panel are of is what that panel shows."""
    corpus = session.calibration.corpus
    one, other = (panel_on(session, (corpus,)) for _ in range(2))
    one.controls.ratio.value, other.controls.ratio.value = "0.5", "0.25"
    for weights in ("compensated", "compress", "unchanged"):
        one.weights.weights.value = weights
        assert session.selection.ratio == 0.5
        press(one.evaluation.job)
        assert session.selection.ratio == 0.5
        assert last_point(one)["ratio"] == 0.5
    assert "50.0%" in one.status.value
    assert "25.0%" in other.status.value
    assert ">25.0%<" in other.numbers.value
    assert other.evaluation.results.value == one.evaluation.results.value
    other.controls.ratio.value = "0.375"
    assert session.selection.ratio == 0.375


@pytest.mark.parametrize("weights", ["compress", "compensated", "unchanged"])
def test_what_is_evaluated_is_what_is_exported(panel, bench, tmp_path, weights):
    """The loss of the files, loaded again, is that of the point and of the card."""
    panel.weights.own.value = 0
    evaluate(panel, "0.5", weights)
    point = last_point(panel)
    assert point["weights"] == weights.replace("unchanged", "masked")
    assert f"Last point, {point['weights']}:" in panel.evaluation.message.value
    export(panel, tmp_path / "out")
    windows = bench.test_windows(panel.evaluation.corpora.value[0])
    loaded = load_like(tmp_path / "out", bench.model)
    measured = evaluate_perplexity(loaded, windows.ids)
    assert measured.nll == pytest.approx(point["nll"], abs=1e-6)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert f"→ {point['perplexity']:.2f}" in card
    assert "| reloaded | Δ nll = 0.0000 on 4 windows of " in card
    dense, *_ = panel.session.points["nll"]
    assert abs(point["nll"] - dense) > 1e-5


def test_weights_are_made_once(panel, tmp_path, monkeypatch):
    """All corpora and Export share them; another ratio or recipe makes them again."""
    fit = Mock(wraps=making.fit_compensation)
    monkeypatch.setattr(making, "fit_compensation", fit)
    evaluate(panel, "0.5", "compensated")
    evaluate(panel)
    export(panel, tmp_path / "out")
    assert fit.call_count == 1
    evaluate(panel, "0.25")
    assert fit.call_count == 2
    evaluate(panel, weights="unchanged")
    ratios = [call.args[1].achieved_ratio for call in fit.mock_calls]
    assert ratios == [0.5, 0.25]
    assert last_point(panel)["weights"] == "masked"


def test_a_switch_that_moves_does_not_change_running_work(panel, tmp_path, monkeypatch):
    """Files have the weights that were shown when the button was pressed."""
    panel.controls.ratio.value = "0.5"
    switch, check_new = panel.weights.weights, folders.check_new

    def moved(folder: Path) -> None:
        switch.value = "unchanged"
        check_new(folder)

    monkeypatch.setattr(folders, "check_new", moved)
    switch.value = "compensated"
    export(panel, tmp_path / "out")
    manifest = read_json(tmp_path / "out" / "heapr_manifest.json")
    assert manifest["weights"].startswith("W_down compensated")


def test_a_cancelled_evaluation_leaves_the_model_dense(panel, bench):
    """Neither the mask nor the new W_down stay in the model, whatever ends the work."""
    session = panel.session
    ids = bench.test_windows(panel.evaluation.corpora.value[0]).ids
    before = evaluate_perplexity(bench.model, ids).nll
    panel.controls.ratio.value = "0.5"
    panel.weights.weights.value = "compensated"

    def stop(_done: float, _total: float, text: str, **_left: object) -> None:
        while_pruned = text.startswith("pruned on")
        if while_pruned and evaluate_perplexity(bench.model, ids).nll != before:
            raise CancelledError

    with pytest.raises(CancelledError):
        session.evaluate(panel.evaluation.corpora.value, report=stop)
    assert evaluate_perplexity(bench.model, ids).nll == before
    assert session.points.empty


def test_compress_is_not_shown_as_the_estimator_above(panel):
    """It chooses its own; until then no mask is shown, and no number of one."""
    panel.controls.estimator.value = "frequency"
    panel.comparison.pin()
    panel.weights.weights.value = "compress"
    panel.weights.own.value = 0
    panel.controls.ratio.value = "0.5"
    panel.comparison.pin()
    assert panel.controls.estimator.disabled
    assert "not known yet: compress chooses" in panel.status.value
    assert panel.picture.layout.display == "none"
    assert "Not known yet" in panel.caption.value
    assert not any(row[0].startswith(("atomic", "bytes")) for row in panel._numbers)
    assert [bool(answer.values) for answer in answers(panel.session)] == [False] * 4
    known = panel.comparison.frame()["flops_reduction"].notna()
    assert known.tolist() == [True, False]
    masked: list[str] = []
    panel.answers.observe(lambda change: masked.append(change["new"]), names="value")
    press(panel.evaluation.job)
    session, point = panel.session, last_point(panel)
    assert any("masked, not yet compress" in text for text in masked)
    assert panel.picture.layout.display is None
    assert panel.comparison.frame()["flops_reduction"].notna().all()
    made = session.made(session.selection, session.recipe)
    assert session.keep == made.keep
    (chosen,) = made.report.loc[made.report["chosen"], "made"]
    assert chosen.split(" + ")[0] == point["estimator"]
    assert point["achieved_ratio"] == made.keep.achieved_ratio
    shown = pd.read_html(StringIO(panel.evaluation.results.value))[0].values
    assert {"compress", point["estimator"]} <= set(shown[-1])
    assert "frequency" not in shown
    rules = "Pruned by: global, by atom, ragged, compress."
    assert rules in panel.evaluation.message.value


def test_points_of_compress_are_of_their_ratio(session):
    """Two ratios that remove only atoms without a score are not taken for one."""
    session.recipe = WeightRecipe("compress")
    session.choose(Selection(0.5))
    row: dict[str, Any] = dict.fromkeys(POINT_COLUMNS, 1.0)
    row |= {"dataset": "text", "weights": session.recipe.text}
    for ratio, n_known in ((0.5, 1), (0.25, 0)):
        chosen = replace(session.selection, ratio=ratio)
        session.points = pd.DataFrame([row | {"selection": chosen, "ratio": ratio}])
        assert len(session.measured()) == n_known


def test_a_point_has_the_sum_of_the_scores_that_ranked(panel):
    """With the options of the estimator, not with its own defaults."""
    session = panel.session
    by_energy: Any = {"alpha": 0.0}
    session.choose(
        Selection(0.5, estimator="camera", scope="layer", estimator_options=by_energy)
    )
    press(panel.evaluation.job)
    (point,) = session.measured().to_dict("records")
    scores = session.table.scores("camera", **by_energy)
    assert point["summed_score"] == scores[~session.keep.rows].sum()


def test_points_of_each_way_stay_apart(panel):
    """Curves stand beside each other; numbers are of the recipe that is shown.

    A pin's loss is of its own weights.
    """
    for weights in ("unchanged", "compensated"):
        for ratio in ("0.25", "0.5"):
            evaluate(panel, ratio, weights)
        panel.comparison.pin()
    points = panel.session.points
    assert points["weights"].tolist().count("dense") == 1
    assert len(points[points["weights"].eq("masked")]) == 2  # none is measured again
    assert sorted(points["weights"].unique()) == ["compensated", "dense", "masked"]
    for weights, text in (("compensated", "compensated"), ("unchanged", "masked")):
        panel.weights.weights.value = weights
        alike = panel.session._points_alike()
        assert alike["weights"].tolist() == [text, text]
    (shown,) = panel.session.measured()["delta_nll"]
    losses = points[points["ratio"].eq(0.5)].set_index("weights")["delta_nll"]
    assert shown == losses["masked"]
    pins = panel.comparison.frame().set_index("weights")
    (name,) = [column for column in pins if column.startswith("Δloss ")]
    assert pins[name].to_dict() == losses.to_dict()


def test_inspect_follows_the_switch(panel, bench):
    """Losses of tokens are of the same weights; another recipe outdates them."""
    tab, session = panel.inspection, panel.session
    tab.text.value = "the sum of the elements"
    panel.controls.ratio.value = "0.5"
    panel.weights.weights.value = "compensated"
    press(tab.compare)
    assert "ragged, compensated)" in tab.compare.value
    passage = tab._passage(tab.text.value)
    made = session.made(session.selection, session.recipe)
    down_projs = made.compensation.down_projs
    expected = token_losses(bench.model, passage, keep=made.keep, down_projs=down_projs)
    pd.testing.assert_frame_equal(tab.losses, expected)
    masked = token_losses(bench.model, passage, keep=made.keep)
    assert not np.allclose(tab.losses["pruned_nll"][1:], masked["pruned_nll"][1:])
    panel.tabs.selected_index = 2
    panel.weights.weights.value = "unchanged"
    assert "Out of date" in tab.compare.note.value
    press(tab.compare)
    assert "50.0% of the atoms removed" in tab.compare.value
    assert "ragged, masked)" in tab.compare.value
    worst = masked["delta_nll"].max()
    assert cells(tab.compare.value)[0][1] == f"{worst:+.3f}"
    pd.testing.assert_frame_equal(tab.losses, masked)
