"""The tab that evaluates: in a thread, until it is cancelled or fails."""

import re
from pathlib import Path

import pytest
from html_text import cells
from pressing import failed, held, press
from random_tables import small_table

from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.panel.pictures import figure_points
from heapr_lab.panel.session import PruningSession
from heapr_lab.workbench.workbench import Workbench


def test_tasks_are_evaluated_and_remembered(panel: Explorer) -> None:
    """Accuracy of both models, in the table and in words."""
    panel.controls.ratio.value = "0.4"
    panel.evaluation.corpora.value = ()
    panel.evaluation.tasks.value = panel.evaluation.tasks.options
    press(panel.evaluation.job)
    points = panel.session.points
    assert points["dataset"].tolist() == [*panel.evaluation.tasks.options] * 2
    assert points["accuracy"].between(0, 1).all()
    assert "accuracy on continuation:" in panel.evaluation.message.value
    assert panel.evaluation.chart.layout.display is None
    (ax,) = figure_points(points).axes
    (curve, *_) = ax.containers[0].lines
    accuracy = points[points["estimator"].eq("heapr")]["accuracy"].astype(float)
    assert curve.get_ydata() == pytest.approx(100 * accuracy)


def test_another_corpus_can_be_typed(panel: Explorer, tmp_path: Path) -> None:
    """It is listed, chosen and measured; what is no corpus is an alert, and stays."""
    tab, file = panel.evaluation, tmp_path / "other.txt"
    (first,) = tab.corpora.value
    tab.another.value = str(file)
    assert str(file) in tab.job.error.value
    assert tab.corpora.value == (first,)
    file.write_text("abba baab " * 400)
    tab.another.value = f" {file}"
    assert tab.another.value == tab.job.error.value == ""
    assert tab.corpora.value == (first, str(file))
    tab.job.button.click()
    tab.job.wait(60)
    assert set(panel.session.points["dataset"]) == {first, str(file)}


def test_points_are_sorted_and_the_last_is_named(panel: Explorer) -> None:
    """The order is by ratio; the name has all that made it, also while it runs."""
    tab, steps = panel.evaluation, list[str]()
    tab.job.text.observe(lambda change: steps.append(change["new"]), "value")
    for ratio in ("0.5", "0.25"):
        panel.controls.ratio.value = ratio
        tab.job.button.click()
        tab.job.wait(60)
    assert re.findall(r"(\d+\.0)%", tab.results.value) == ["0.0", "25.0", "50.0"]
    settings = "heapr, global, by atom, ragged, masked"
    assert f"Pruned by: {settings}." in tab.message.value
    named = "heapr, 0.25 of the atoms, global scope, by atom, ragged, masked: pruned on"
    assert any(named in step for step in steps)


def test_panel_of_a_table_cannot_evaluate() -> None:
    """Without a model the button is off, and text says why."""
    panel = explore(small_table())
    assert panel.evaluation.job.button.disabled
    assert "without a model" in panel.evaluation.job.text.value
    assert panel.evaluation.sweep.job.button.disabled


def test_panel_evaluates(panel: Explorer) -> None:
    """The button measures in a thread; chart and table then hold all points."""
    panel.controls.ratio.value = "0.35"
    press(panel.evaluation.job)
    assert panel.error.value == ""
    assert not panel.evaluation.job.button.disabled
    assert panel.evaluation.job.cancel_button.disabled
    first = bytes(panel.evaluation.chart.value)
    assert first.startswith(b"\x89PNG")
    assert len(cells(panel.evaluation.results.value)) == 2  # dense and pruned

    panel.controls.ratio.value = "0.55"
    press(panel.evaluation.job)
    assert bytes(panel.evaluation.chart.value) != first
    assert len(cells(panel.evaluation.results.value)) == 3
    points = panel.session.points
    (ax,) = figure_points(points).axes
    curve = next(line for line in ax.get_lines() if line.get_marker() == "o")
    pruned = points[points["estimator"] == "heapr"]
    losses = pruned["delta_nll"].to_numpy(dtype=float)
    assert curve.get_ydata() == pytest.approx([0.0, *losses])
    assert curve.get_markevery() == slice(1, None)  # none where nothing is pruned
    assert [bar.has_yerr for bar in ax.containers] == [True]


def test_panel_cancels(panel: Explorer) -> None:
    """Cancel ends the run between two batches; no point is added, and all is ready."""
    panel.controls.ratio.value = "0.85"
    job = panel.evaluation.job
    with held(job, " of "):
        assert (job.button.disabled, job.cancel_button.disabled) == (True, False)
        panel.controls.ratio.value = "0.8"  # the slider stays alive meanwhile
        assert "79.7%" in panel.status.value  # 51 of 64
        job.cancel_button.click()
    assert "cancelled" in job.text.value
    assert panel.session.points.empty
    assert not panel.evaluation.job.button.disabled


def test_panel_shows_errors(bench: Workbench, root: Path) -> None:
    """A corpus that does not exist: the message stands in the panel."""
    table = bench.measure(bench.test_windows(str(root / "text.txt")))
    panel = Explorer(
        PruningSession(table, workbench=bench), corpora=("no <such> corpus",)
    )
    assert "no &lt;such&gt; corpus" in failed(panel.evaluation.job)
    assert not panel.evaluation.job.button.disabled


def test_panel_shows_what_was_not_foreseen(
    panel: Explorer, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that nobody foresaw is shown with its type, and logged whole."""
    panel.session.workbench = object()  # type: ignore[assignment]
    assert "AttributeError" in failed(panel.evaluation.job)
    assert "Traceback" in caplog.text
