"""The Compare tab runs methods: beside saved selections, in turn, until cancelled."""

import re

import msgspec
import pytest
from figure_rows import dots_of
from matplotlib.colors import to_hex
from pressing import error_of, held, panel_on, press
from random_tables import random_table

from heapr_lab import methods
from heapr_lab.errors import SpecError
from heapr_lab.methods.comparison import compare_methods, entries
from heapr_lab.panel.compare_tab import CompareTab
from heapr_lab.panel.opening import explore
from heapr_lab.panel.session import PruningSession
from heapr_lab.storage.files import read_frame


def run(tab: CompareTab, *names: str, ratio: str = "50%") -> str:
    """What stands below the button after these methods were run."""
    tab.runs.methods.value = names
    tab.runs.ratio.value = ratio
    return error_of(tab.runs.job)


def test_methods_stand_next_to_saved_settings(panel, tmp_path):
    """One table, one picture, one export; numbers are those of `compare_methods`."""
    tab, bench = panel.comparison, panel.session.workbench
    assert tab.runs.methods.options == methods.names()
    panel.controls.ratio.value = "0.25"
    tab.pin_button.click()
    assert run(tab, "heapr", "reap") == ""
    frame = tab.frame()
    assert frame["label"].tolist() == ["A", "heapr 50%", "reap 50%"]
    assert frame["achieved_ratio"].tolist() == [0.25, 0.5, 0.5]
    (corpus,) = tab.runs.corpora.value
    direct = compare_methods(
        bench,
        entries(["heapr", "reap"], [0.5]),
        [corpus],
        calibration=panel.session.calibration,
    )
    losses = direct["nll"] - direct["nll"][0]
    assert frame[f"Δloss {corpus}"].tolist()[1:] == losses.tolist()[1:]
    saved = 1 - direct["parameters"] / direct["parameters"][0]
    assert frame["parameter_reduction"].tolist()[1:] == saved.tolist()[1:]
    saved = 1 - direct["routed_flops"] / direct["routed_flops"][0]
    assert frame["routed_flops_reduction"].tolist()[1:] == saved.tolist()[1:]
    assert "1 pinned, 2 of methods." in tab.message.value
    firsts = re.findall(r"<tr[^>]*>\s*<td[^>]*>([^<]*)", tab.table.value)
    assert firsts == ["A", "heapr 50%", "reap 50%"]
    assert "50.0%" in tab.table.value
    assert "nan" not in tab.table.value.lower()
    figure = tab.figure(frame)
    left, right = figure.axes
    assert len(left.get_lines()) == 1  # the pin alone has layers
    assert len(dots_of(right)) == 3
    (legend,) = figure.legends
    lines = [handle.get_linestyle() for handle in legend.get_lines()]
    assert lines == ["-", "None", "None"]
    tab.export(tmp_path)
    stored, metadata = read_frame(tmp_path / "comparison.parquet")
    assert stored["label"].tolist() == frame["label"].tolist()
    assert metadata["methods"] == ["heapr 50%", "reap 50%"]


def test_losses_are_drawn_against_what_is_saved(panel):
    """A dot for each method and ratio, at the parameters that it saves."""
    tab = panel.comparison
    assert run(tab, "heapr", "random", ratio="25%, 50%") == ""
    frame = tab.frame()
    assert frame["label"].tolist() == [
        "heapr 25%", "heapr 50%", "random 25%", "random 50%"
    ]  # fmt: skip
    (loss,) = [name for name in frame if name.startswith("Δloss ")]
    (ax,) = tab.figure(frame).axes
    assert ax.get_xlabel() == "parameters saved"
    drawn = [tuple(dot.get_xydata()[0]) for dot in dots_of(ax)]
    assert drawn == list(zip(frame["parameter_reduction"], frame[loss], strict=True))
    unknown = frame.drop(columns="parameter_reduction")
    (ax,) = tab.figure(unknown).axes
    assert ax.get_xlabel() == "atomic experts removed"


def test_many_rows_look_different(panel):
    """No two of twelve have the same colour and strength."""
    tab = panel.comparison
    rows = [f"method {number}" for number in range(12)]
    numbers = {"achieved_ratio": 0.5, "parameter_reduction": 0.1, "Δloss pydocs": 0.2}
    tab.session.method_rows = [{"label": row, "method": row, **numbers} for row in rows]
    (ax,) = tab.figure(tab.frame()).axes
    dots = dots_of(ax)
    looks = {(to_hex(dot.get_color()), dot.get_alpha()) for dot in dots}
    assert len(dots) == len(looks) == 12


def test_looks_stay_while_rows_come_and_go():
    """A row keeps its colour, a new one takes what is free; twins are both named."""
    session = PruningSession(random_table(2, 4, 16))
    tab = CompareTab(session)
    for _ in "ABC":
        tab.pin()

    def colors() -> dict[str, str]:
        (legend,) = tab.figure(tab.frame()).legends
        texts = [text.get_text() for text in legend.get_texts()]
        drawn = [to_hex(line.get_color()) for line in legend.get_lines()]
        return dict(zip(texts, drawn, strict=True))

    before = colors()
    assert len(set(before.values())) == 3
    _, right = tab.figure(tab.frame()).axes
    assert [text.get_text() for text in right.texts] == ["A, B, C"]
    sizes = [dot.get_markersize() for dot in dots_of(right)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    tab.pinned.index = 0
    tab.remove_button.click()
    assert colors() == {label: before[label] for label in "BC"}
    tab.label.value = "D"
    tab.pin()
    assert colors() == {"B": before["B"], "C": before["C"], "D": before["A"]}


def test_methods_need_no_pin(panel):
    """A second run adds to the first, the same again replaces it; Clear removes all."""
    tab = panel.comparison
    run(tab, "heapr")
    run(tab, "heapr", "random", ratio="25%")
    run(tab, "heapr")
    labels = ["heapr 25%", "random 25%", "heapr 50%"]
    assert tab.frame()["label"].tolist() == labels
    (alone,) = tab.figure(tab.frame()).axes
    assert "Δloss" in alone.get_ylabel()
    tab.clear_button.click()
    assert tab.session.method_rows == []
    assert "Nothing pinned yet" in tab.message.value
    assert tab.chart.layout.display == "none"
    assert tab.export_button.disabled


def test_rows_are_of_the_text_that_they_were_measured_on(session, root, tmp_path):
    """They go once the corpus has another; neither they nor points are opened then."""
    file, text = tmp_path / "mine.txt", (root / "text.txt").read_text()
    file.write_text(text)
    first = panel_on(session, (str(file),))
    run(first.comparison, "heapr")
    saved = first.files.saved()
    other = PruningSession(session.table, workbench=session.workbench)
    panel = panel_on(other, (str(file),))
    panel.files.restore(saved)
    assert panel.comparison.frame()["label"].tolist() == ["heapr 50%"]
    file.write_text(text[::-1])
    press(panel.evaluation.job)
    points = panel.files.saved()
    assert panel.comparison.frame().empty
    first.comparison.clear_button.click()
    press(first.evaluation.job)
    first.comparison.undo_button.click()
    assert first.comparison.frame().empty
    with pytest.raises(SpecError, match=r"mine\.txt is another text"):
        panel.files.restore(saved)
    fewer = msgspec.structs.replace(saved.tests, n_test=3)
    with pytest.raises(SpecError, match="expected Tests"):
        panel.files.restore(msgspec.structs.replace(saved, tests=fewer))
    file.write_text(text)
    with pytest.raises(SpecError, match=r"mine\.txt is another text"):
        panel.files.restore(points)


@pytest.mark.parametrize(
    ("names", "ratio", "message"),
    [
        (("reap",), "75%", "the largest possible ratio"),
        (("heapr",), "25", "expected a fraction"),
        ((), "25%", "select methods and corpora"),
    ],
)
def test_an_error_leaves_what_is_shown(panel, names, ratio, message):
    """It stands below the button; what was made stays, and more can be."""
    tab = panel.comparison
    run(tab, "heapr")
    before = tab.chart.value, tab.table.value
    error = run(tab, *names, ratio=ratio)
    assert message in error
    assert 'role="alert"' in error
    assert (tab.chart.value, tab.table.value) == before
    assert tab.chart.layout.display is None
    assert run(tab, "frequency") == ""
    assert tab.frame()["label"].tolist() == ["heapr 50%", "frequency 50%"]
    assert bytes(tab.chart.value).startswith(b"\x89PNG")
    assert not tab.export_button.disabled


def test_a_run_is_cancelled_and_others_wait(panel):
    """Progress names the method; Cancel ends it within a fit, and nothing is added."""
    tab, job = panel.comparison, panel.evaluation.job
    tab.runs.methods.value, tab.runs.ratio.value = ("ean",), "0.5"
    with held(tab.runs.job, "ean at 50%"):
        assert "wait until Run methods has ended" in error_of(job)
        tab.runs.job.cancel_button.click()
    assert "cancelled" in tab.runs.job.text.value
    assert tab.runs.job.error.value == ""
    assert tab.session.method_rows == []
    press(job)
    assert run(tab, "ean") == ""
    assert tab.frame()["label"].tolist() == ["ean 50%"]


def test_methods_wait_for_other_work(panel):
    """A method that drops experts would change what is being evaluated."""
    panel.controls.ratio.value = "0.65"
    with held(panel.evaluation.job, " of "):
        assert "wait until Evaluate has ended" in run(panel.comparison, "reap")
    assert panel.evaluation.job.error.value == ""


def test_a_table_alone_cannot_be_run():
    """Buttons are off, and text says why; pins work as before."""
    panel = explore(random_table(2, 4, 16))
    tab, evaluation = panel.comparison, panel.evaluation
    for job in (tab.runs.job, evaluation.job, evaluation.sweep.job):
        assert job.button.disabled
    assert "need a model" in tab.runs.job.text.value
    assert "without a model" in evaluation.job.text.value
    tab.pin_button.click()
    assert "1 pinned." in tab.message.value
