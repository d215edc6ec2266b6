"""The tab that evaluates: in a thread, until it is cancelled or fails."""

import re

import pytest
from html_text import cells
from pressing import evaluate, failed, held, panel_on, press

from heapr_lab.panel.answer import answers
from heapr_lab.panel.pictures import figure_points

SAME_TEXT = "Perplexity was only measured on what was calibrated on"


@pytest.mark.parametrize("weights", ["unchanged", "compress"])
def test_at_ratio_0_the_dense_model_is_what_is_asked_for(panel, weights):
    """The numbers are those of the dense model."""
    tab = panel.evaluation
    tab.tasks.value = tab.tasks.options
    (task,) = panel.session._parts(tab.tasks.options)
    assert task.n_windows == 32  # as it was not measured yet
    evaluate(panel, "0", weights)
    assert panel.session.keep.n_removed == 0
    perplexity, accuracy = answers(panel.session)[2:]
    assert (perplexity.stale, accuracy.stale) == (False, False)
    assert perplexity.change.startswith("+0.000")


def test_another_corpus_can_be_typed(panel, tmp_path, monkeypatch):
    """It is listed, chosen and measured; what is no corpus is an alert, and stays."""
    monkeypatch.setenv("HOME", str(tmp_path))
    tab, file = panel.evaluation, tmp_path / "other.txt"
    (first,) = tab.corpora.value
    tab.another.value = str(file)
    assert str(file) in tab.job.error.value
    assert tab.corpora.value == (first,)
    file.write_text("abba baab " * 400)
    tab.another.value = " ~/other.txt"
    assert tab.another.value == tab.job.error.value == ""
    assert tab.corpora.value == (first, str(file))
    assert SAME_TEXT not in tab.cautions.value
    press(tab.job)
    assert set(panel.session.points["dataset"]) == {first, str(file)}
    assert tab.cautions.value == ""


def test_panel_evaluates(panel):
    """The button measures in a thread; chart and table then hold all points.

    The order is by ratio; the name has all that made it, also while it runs.
    """
    tab, steps = panel.evaluation, list[str]()
    tab.job.text.observe(lambda change: steps.append(change["new"]), "value")
    evaluate(panel, "0.5")
    assert panel.error.value == ""
    assert not tab.job.button.disabled
    assert tab.job.cancel_button.disabled
    first = bytes(tab.chart.value)
    assert first.startswith(b"\x89PNG")
    assert len(cells(tab.results.value)) == 2  # dense and pruned
    assert SAME_TEXT in tab.cautions.value

    for ratio, takes_time in (("0.25", True), ("7", False)):
        panel.controls.ratio.value = ratio  # not measured, infeasible
        assert ("about " in tab.job.text.value) == takes_time
    panel.controls.ratio.value = "0.25"
    for corpora in ((), tab.corpora.options):
        tab.corpora.value = corpora
        assert ("about " in tab.job.text.value) == bool(corpora)
    evaluate(panel, "0.25")
    assert bytes(tab.chart.value) != first
    assert re.findall(r"(\d+\.0)%", tab.results.value) == ["0.0", "25.0", "50.0"]
    settings = "heapr, global, by atom, ragged, masked"
    assert f"Pruned by: {settings}." in tab.message.value
    named = "heapr, 0.25 of the atoms, global scope, by atom, ragged, masked: pruned on"
    assert any(named in step for step in steps)
    points = panel.session.points
    (ax,) = figure_points(points).axes
    curve = next(line for line in ax.get_lines() if line.get_marker() == "o")
    pruned = points[points["estimator"] == "heapr"]
    losses = pruned["delta_nll"].to_numpy(dtype=float)[::-1]
    assert curve.get_ydata() == pytest.approx([0.0, *losses])
    assert curve.get_markevery() == slice(1, None)  # none where nothing is pruned
    assert [bar.has_yerr for bar in ax.containers] == [True]


def test_panel_cancels(panel):
    """Cancel ends the run between two batches; no point is added, and all is ready."""
    panel.controls.ratio.value = "0.85"
    job = panel.evaluation.job
    displays = job.cancel_button.layout, job.bar.layout
    assert [layout.display for layout in displays] == ["none", "none"]
    with held(job, " of "):
        assert [layout.display for layout in displays] == [None, None]
        assert (job.button.disabled, job.cancel_button.disabled) == (True, False)
        panel.controls.ratio.value = "0.8"  # the slider stays alive meanwhile
        assert "79.7%" in panel.status.value  # 51 of 64
        job.cancel_button.click()
    assert "cancelled" in job.text.value
    assert [layout.display for layout in displays] == ["none", "none"]
    assert panel.session.points.empty
    assert not job.button.disabled


def test_panel_shows_errors(panel):
    """A corpus that does not exist: the message stands in the panel."""
    job = panel_on(panel.session, ("no <such> corpus",)).evaluation.job
    assert "no &lt;such&gt; corpus" in failed(job)


def test_panel_shows_what_was_not_foreseen(panel, caplog):
    """An error that nobody foresaw is shown with its type, and logged whole."""
    panel.session.workbench = object()  # type: ignore[assignment]
    assert "AttributeError" in failed(panel.evaluation.job)
    assert "Traceback" in caplog.text
