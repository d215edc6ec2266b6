"""What the panel shows is of what is chosen, or says that it is not."""

import pytest
from pressing import error_of, evaluate, export, is_stale, press
from random_tables import random_table

from heapr_lab.errors import SpecError
from heapr_lab.panel.jobs import jobs_in
from heapr_lab.panel.opening import explore
from heapr_lab.pruning.options import Selection, read_ratio

# --- what is typed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("0.4", 0.4), ("40%", 0.4), (" .5 ", 0.5), ("33.3%", 0.333),
        ("1e-3", 0.001), ("0", 0.0), ("0.995", 0.995), ("1%", 0.01),
    ],
)  # fmt: skip
def test_ratios_are_read_exactly(text, ratio):
    """Fractions and per cent, with a point or a comma, to the last digit."""
    assert read_ratio(text) == ratio


@pytest.mark.parametrize(
    "text", ["40", "1", "100%", "-0.1", "", "half", "nan", "inf", "1,000.5", "0.4.1"]
)
def test_ratios_that_are_none_are_refused(text):
    """Never another number in their place."""
    with pytest.raises(SpecError, match="expected a fraction from 0 to below 1"):
        read_ratio(text)


def test_the_box_says_what_is_chosen():
    """The slider shows the nearest step; the choice is what stands in the box.

    What a 40 was meant to be is suggested.
    """
    panel = explore(random_table(2, 4, 16))
    controls = panel.controls
    for text, ratio in (("0.333", 0.333), ("40%", 0.4), ("1e-3", 0.001)):
        controls.ratio.value = text
        assert panel.session.selection.ratio == ratio
        assert controls.slider.value == round(100 * ratio)
        assert controls.ratio.value == text
        assert panel.error.value == ""
    controls.slider.value = 30
    controls.ratio.value = "40"
    assert "write 0.40 or 40%" in panel.error.value
    assert controls.slider.value == 30
    controls.slider.value = 50
    assert panel.error.value == ""


# --- what is out of date --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("min_atoms", 16), ("ratio", "40"), ("excluded", "1-0")]
)
def test_an_infeasible_choice_greys_the_old_picture(name, value):
    """Picture and table are said to be old, until the choice is feasible again."""
    panel = explore(random_table(2, 4, 16), selection=Selection(ratio=0.5))
    box = getattr(panel.controls, name)
    before, box.value = box.value, value
    assert 'role="alert"' in panel.error.value
    assert "infeasible" in panel.status.value
    assert "Out of date" in panel.status.value
    assert "heapr, 0.5 of the atoms" in panel.status.value
    assert is_stale(panel.picture)
    assert is_stale(panel.behind)
    assert panel.numbers.value == ""
    box.value = before
    assert not is_stale(panel.picture)
    assert not is_stale(panel.behind)
    assert "Out of date" not in panel.status.value


def test_nothing_goes_on_with_the_choice_of_before(panel, tmp_path):
    """Evaluate, Export, Pin and Inspect refuse while the settings are infeasible."""
    panel.controls.ratio.value = "40"
    panel.export.folder.value = str(tmp_path / "pruned")
    for job in (panel.evaluation.job, panel.export.job, panel.inspection.compare):
        assert "infeasible" in error_of(job)
    panel.comparison.pin_button.click()
    assert "infeasible" in panel.comparison.message.value
    assert panel.comparison.pins == []
    assert panel.session.points.empty
    assert not (tmp_path / "pruned").exists()
    assert "Nothing can be written" in panel.export.note.value
    evaluate(panel, "40%")
    assert len(panel.session.points) == 2


def test_inspections_are_marked_when_choice_or_text_change(panel):
    """They are not when both are again what the result was made of."""
    tab = panel.inspection
    panel.tabs.selected_index = 2
    tab.text.value = "aaab bbba abab"
    panel.controls.ratio.value = "0.4"
    shown = [tab.compare, tab.attribute]
    for job in shown:
        press(job)
        assert not is_stale(job._view)
    panel.controls.ratio.value = "0.8"
    assert all("Out of date" in each.note.value for each in shown)
    panel.controls.ratio.value = "0.4"
    assert not any(each.note.value for each in shown)
    tab.text.value = ""
    assert is_stale(tab.compare._view)
    tab.text.value = "aaab bbba abab"
    assert not is_stale(tab.compare._view)
    panel.controls.ratio.value = "40"
    assert is_stale(tab.compare._view)


def test_every_job_names_what_it_is_of(panel):
    """Its progress says it, whatever the settings are by then."""
    labels = {job.button.description: job._of() for job in jobs_in(panel)}
    assert [name for name, text in labels.items() if not text] == []


def test_points_of_an_opened_session_replace_those_before(panel):
    """They do so with the same settings as well, and if the session has none.

    *Undo* brings all back; differences need the texts of the points, too.
    """
    tab = panel.evaluation
    panel.tabs.selected_index = 1
    empty = panel.files.saved()
    for weights in ("compensated", "unchanged"):
        evaluate(panel, weights=weights)
    views = tab.results, tab.chart, tab.differences
    full = [view.value for view in views]
    assert all(full)
    panel.files.replace(empty)
    assert "Nothing has been evaluated yet" in tab.message.value
    assert (tab.results.value, tab.chart.layout.display) == ("", "none")
    assert tab.cautions.value == tab.differences.value == ""
    panel.files.undo_button.click()
    assert [view.value for view in views] == full
    assert tab.chart.layout.display is None


def test_what_was_written_is_marked_when_settings_change(panel, tmp_path):
    """The code that loads it stays readable; the same settings are not marked."""
    tab = panel.export
    panel.controls.ratio.value = "0.4"
    assert "Written to" in export(panel, tmp_path / "pruned")
    for control, other in (
        (panel.controls.ratio, "0.6"),
        (panel.weights.weights, "compensated"),
        (tab.heal, 32),
        (tab.folder, "elsewhere"),
    ):
        before, control.value = control.value, other
        assert "Out of date" in tab.job.note.value
        assert is_stale(tab.job._view)
        assert "Written to" in tab.job.value
        control.value = before
        assert tab.job.note.value == ""
