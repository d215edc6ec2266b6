"""What the panel shows is of what is chosen, or says that it is not."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from figure_rows import dots_of
from matplotlib.colors import to_hex
from pressing import error_of, evaluate, export, is_stale, press
from random_tables import random_table

from heapr_lab.errors import SpecError
from heapr_lab.panel.compare_tab import CompareTab
from heapr_lab.panel.jobs import jobs_in
from heapr_lab.panel.opening import explore
from heapr_lab.panel.pictures import ChoicePicture, drawn_png, figure_points
from heapr_lab.panel.session import POINT_COLUMNS, PruningSession
from heapr_lab.pruning.options import Selection, read_ratio

# --- what is typed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("0.4", 0.4), ("40%", 0.4), ("40 %", 0.4), ("0,4", 0.4), (" .5 ", 0.5),
        ("0.333", 0.333), ("33.3%", 0.333), ("1e-3", 0.001), ("0", 0.0),
        ("0.995", 0.995), ("1%", 0.01),
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
    shown = [tab.compare, tab.route, tab.show_contexts, tab.attribute, tab.explain]
    for job in shown:
        press(job)
        assert not is_stale(job._view)
    panel.controls.ratio.value = "0.8"
    assert all("Out of date" in each.note.value for each in shown)
    panel.controls.ratio.value = "0.4"
    assert not any(each.note.value for each in shown)
    tab.text.value = ""
    assert is_stale(tab.compare._view)
    assert not is_stale(tab.show_contexts._view)  # the text does not matter to it
    tab.atom.value += 1
    assert is_stale(tab.show_contexts._view)
    tab.text.value = "aaab bbba abab"
    assert not is_stale(tab.compare._view)
    panel.controls.ratio.value = "40"
    assert is_stale(tab.compare._view)


def test_every_job_names_what_it_is_of(panel):
    """Its progress says it, whatever the settings are by then."""
    labels = {job.button.description: job._of() for job in jobs_in(panel)}
    assert [name for name, text in labels.items() if not text] == []
    assert labels["Show contexts"] == "layer of the atom 0, expert 0, atom 0"


def test_an_evaluation_is_marked_when_settings_or_corpora_change(panel):
    """It is marked until exactly what is chosen is evaluated, tasks included."""
    tab = panel.evaluation
    panel.tabs.selected_index = 1
    assert tab.note.value == ""
    evaluate(panel, "0.4")
    assert (tab.note.value, is_stale(tab.message)) == ("", False)
    controls: list[tuple[Any, Any]] = [
        (panel.controls.ratio, "0.6"),
        (panel.controls.ratio, "40"),
        (panel.weights.weights, "compensated"),
        (tab.tasks, tab.tasks.options),
    ]
    for control, other in controls:
        before, control.value = control.value, other
        assert "Out of date" in tab.note.value
        assert is_stale(tab.message)
        control.value = before
        assert (tab.note.value, is_stale(tab.message)) == ("", False)
    evaluate(panel, "0.6")
    assert not is_stale(tab.message)


def test_points_of_an_opened_session_replace_those_before(panel):
    """They do so with the same settings as well, and if the session has none."""
    tab = panel.evaluation
    panel.tabs.selected_index = 1
    empty = panel.files.saved()
    press(tab.job)
    full, table, chart = panel.files.saved(), tab.results.value, tab.chart.value
    assert table
    panel.files.restore(empty)
    assert "Nothing has been evaluated yet" in tab.message.value
    assert (tab.results.value, tab.chart.layout.display) == ("", "none")
    assert tab.note.value == tab.cautions.value == ""
    panel.files.restore(full)
    assert (tab.results.value, tab.chart.value) == (table, chart)
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


# --- what is drawn --------------------------------------------------------------------


def points_of(*rows: dict[str, Any]) -> pd.DataFrame:
    """Points of a session, each with a loss of its own unless it has an accuracy."""
    points = []
    for number, row in enumerate(rows):
        ratio = 0.25 + 0.01 * number
        plain = {"selection": Selection(ratio), "estimator": "heapr"}
        plain |= {"achieved_ratio": ratio, "dataset": "pydocs"}
        plain |= {"weights": "masked"}
        loss = 0.1 * (number + 1)
        if "accuracy" not in row:
            plain |= {"nll": 3 + loss, "delta_nll": loss, "perplexity": np.exp(3)}
        points.append(plain | row)
    return pd.DataFrame(points, columns=list(POINT_COLUMNS))


def test_each_choice_has_its_own_colour_and_marker():
    """Corpus and estimator are the same; the legend says what tells them apart."""
    (ax,) = figure_points(
        points_of(
            {},
            {"dataset": "ptb"},
            {"selection": Selection(0.3, structure="uniform", multiple=8)},
            {"selection": Selection(0.3, min_atoms=3)},
            {"selection": Selection(0.3, exclude_layers=(0, 2))},
            {"selection": Selection(0.3, of="model")},
        )
    ).axes
    lines = ax.get_lines()
    labels = [line.get_label() for line in lines]
    rules = "measured: heapr, global, by atom"
    assert labels == [
        f"pydocs, {rules}, ragged, masked",
        f"ptb, {rules}, ragged, masked",
        f"pydocs, {rules}, uniform, multiples of 8, masked",
        f"pydocs, {rules}, ragged, at least 3 atoms each, masked",
        f"pydocs, {rules}, ragged, layers 0, 2 not pruned, masked",
        f"pydocs, {rules}, ragged, of the parameters (model), masked",
    ]
    looks = [(to_hex(line.get_color()), line.get_marker()) for line in lines]
    assert looks[0] == looks[1]  # one choice
    assert lines[0].get_linestyle() != lines[1].get_linestyle()  # two corpora
    colors, markers = zip(*looks[1:], strict=True)
    assert len(set(colors)) == len(set(markers)) == 5


def test_accuracy_is_drawn_in_a_chart_of_its_own():
    """It is in per cent, with standard errors and a dense line, below the loss."""
    task = {"dataset": "continuation", "stderr": 0.05}
    alone = figure_points(points_of({}))
    dense = {"estimator": "dense", "selection": None, "achieved_ratio": 0.0}
    both = figure_points(
        points_of({}, {**task, **dense, "accuracy": 0.7}, {**task, "accuracy": 0.5})
    )
    heights = [drawn_png(lambda fig=fig: fig)[20:24] for fig in (alone, both)]
    assert int.from_bytes(heights[1], "big") == 2 * int.from_bytes(heights[0], "big")
    losses, accuracy = both.axes
    assert losses.get_position().width == alone.axes[0].get_position().width
    ((curve, _, bars),) = [c.lines for c in accuracy.containers]
    assert curve.get_ydata().tolist() == [50.0]
    (segment,) = bars[0].get_segments()
    assert np.ptp(segment[:, 1]) == pytest.approx(2 * 5)
    (line,) = [n for n in accuracy.get_lines() if "dense" in n.get_label()]
    assert set(line.get_ydata()) == {70.0}
    assert accuracy.get_ylabel() == "accuracy [%] ↑"


def test_pins_have_one_colour_and_marker_and_corpora_one_filling():
    """Both charts of the comparison agree, with a legend for each."""
    session = PruningSession(random_table(2, 4, 16))
    tab = CompareTab(session)
    for ratio in (0.25, 0.5):
        session.choose(Selection(ratio=ratio))
        tab.pin()
    frame = tab.frame().assign(**{"Δloss pydocs": [0.1, 0.2], "Δloss ptb": [0.3, 0.4]})
    figure = tab.figure(frame)
    left, right = figure.axes
    of_pins = [(line.get_color(), line.get_marker()) for line in left.get_lines()]
    assert [len(set(looks)) for looks in zip(*of_pins, strict=True)] == [2, 2]
    dots = dots_of(right)
    looks = {(dot.get_color(), dot.get_marker(), dot.get_fillstyle()) for dot in dots}
    assert len(dots) == len(looks) == 4
    assert {look[:2] for look in looks} == set(of_pins)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["A", "B"]
    named = [(line.get_color(), line.get_marker()) for line in legend.get_lines()]
    assert named == of_pins
    corpora = [text.get_text() for text in right.get_legend().get_texts()]
    assert corpora == ["pydocs", "ptb"]


def test_whole_experts_stand_in_the_histogram_of_whole_experts():
    """Scores are summed; all that go are below the cut where all sizes agree."""
    table = random_table(2, 4, 16)
    session = PruningSession(table)
    session.choose(Selection(ratio=0.5, granularity="expert"))
    picture = ChoicePicture(table)
    picture.draw(session.keep, estimator="heapr", granularity="expert")
    bins = picture.figure.axes[2]
    every, gone = (stairs.get_data().values for stairs in bins.patches)
    assert (every.sum(), gone.sum()) == (8, 4)
    (cut,) = {float(x) for x in bins.get_lines()[0].get_xdata()}
    sums = table.scores("heapr").reshape(8, 16).sum(1)
    assert (sums <= cut).sum() == 4
    assert bins.get_ylabel() == "whole experts [count]"
    assert bins.get_xlabel() == "score [nats per routed token]"
    picture.draw(session.keep, estimator="heapr")
    assert bins.get_ylabel() == "atomic experts [count]"
