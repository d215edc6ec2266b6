"""What a saved notebook shows of a panel: its picture and numbers, without a kernel."""

import base64
import hashlib
import io
import re
import time
from typing import Any

import pandas as pd
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook
from pressing import press
from random_tables import small_table

from heapr_lab.experiments.notebooks import normalise
from heapr_lab.panel import jobs, keeping
from heapr_lab.panel.jobs import SECONDS
from heapr_lab.panel.keeping import CLASS
from heapr_lab.panel.opening import explore
from heapr_lab.pruning.options import Selection

WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURE = re.compile(r'src="data:image/png;base64,([^"]+)"')
WAIT_SECONDS = 30
Shown = list[tuple[dict[str, str], dict[str, Any]]]


@pytest.fixture
def shown(monkeypatch) -> Shown:
    """What is displayed from now on: media types, and options."""
    displays: Shown = []

    def record(data: dict[str, str], **options: Any) -> None:
        displays.append((data, options))

    monkeypatch.setattr(keeping, "display", record)
    return displays


def pictures(page: str) -> list[bytes]:
    """The pictures in a page."""
    return [base64.b64decode(data) for data in PICTURE.findall(page)]


def test_the_copy_is_an_output_below_the_widget(shown):
    """JupyterLab would show nothing else of an output that holds a widget."""
    panel = explore(small_table(), selection=Selection(0.5))
    panel._ipython_display_()
    (widget, _), (copy, options) = shown
    assert widget[WIDGET]["model_id"] == panel.model_id  # type: ignore[index]
    assert set(widget) == {WIDGET, "text/plain"}
    assert WIDGET not in copy
    assert options["display_id"]
    assert pictures(copy["text/html"]) == [bytes(panel.picture.value)]
    assert panel.numbers.value in copy["text/html"]
    assert "heapr, 0.5 of the atoms" in copy["text/html"]
    assert "weights: masked" in copy["text/html"]
    assert "atomic experts: dense 16, pruned 8, saved 50.0%" in copy["text/plain"]
    assert "parameters: dense 10,384, pruned 10,192" in copy["text/plain"]


def test_the_panel_hides_its_own_copy_only(shown):
    """The style that hides it is in the widget, and names no other panel's."""
    styles = set()
    for place in (1, 3):
        panel = explore(small_table())
        panel._ipython_display_()
        (name,) = re.findall(rf"{CLASS}-\w+", shown[place][0]["text/html"])
        assert panel.copy.hides in panel.children
        assert panel.copy.hides.value == f"<style>.{name} {{display: none}}</style>"
        styles.add(name)
    assert len(styles) == 2


def test_moves_are_followed_by_one_update(shown, monkeypatch):
    """Only the last of many moves is copied, into the same output."""
    monkeypatch.setattr(jobs, "SECONDS", SECONDS / 4)
    panel = explore(small_table(), selection=Selection(0.5))
    panel.controls.ratio.value = "0.25"
    time.sleep(SECONDS / 2)
    assert shown == []  # it is not in any notebook
    panel._ipython_display_()
    for ratio in ("0.1", "0.2", "0.75"):
        panel.controls.ratio.value = ratio
    deadline = time.monotonic() + WAIT_SECONDS
    while len(shown) == 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    copy, options = shown[2]
    assert options.pop("update")
    assert options == shown[1][1]
    assert "atomic experts: dense 16, pruned 4, saved 75.0%" in copy["text/plain"]
    assert pictures(copy["text/html"]) == [bytes(panel.picture.value)]
    time.sleep(SECONDS / 2)
    assert len(shown) == 3


def test_an_infeasible_selection_has_no_numbers(shown):
    """The alert is copied as well: the picture is that of the selection before."""
    panel = explore(small_table(), selection=Selection(0.5))
    panel.controls.min_atoms.value = 4
    panel._ipython_display_()
    copy = shown[1][0]
    assert panel.error.value in copy["text/html"]
    assert "atomic experts" not in "".join(copy.values())


def test_points_are_copied(panel, shown):
    """The measured losses of all ratios, and of the selection."""
    panel.controls.ratio.value = "0.25"
    panel._ipython_display_()
    press(panel.evaluation.job)
    panel.copy.update()
    copy = shown[-1][0]
    point = panel.session.points.iloc[-1]
    assert f"{point.perplexity:.4f}" in copy["text/html"]
    assert f"pruned {point.delta_nll:.3g}" in copy["text/plain"]


CELLS = (
    "from heapr_lab.panel.opening import explore",
    "panel = explore('table.parquet')\npanel",
    "import hashlib\n"
    "panel.controls.ratio.value = '0.75'\n"
    "print(hashlib.sha256(bytes(panel.picture.value)).hexdigest())",
)


def test_a_notebook_needs_no_kernel(tmp_path):
    """nbconvert, as nbviewer, shows the last selection, which a later cell made.

    The normal form, which is committed, has the copy, but no widget and no made-up
    name.
    """
    small_table().write(tmp_path / "table.parquet")
    notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, resources=resources, store_widget_state=False).execute()
    page, _ = HTMLExporter().from_notebook_node(notebook)
    (picture,) = pictures(page)
    assert hashlib.sha256(picture).hexdigest() in notebook.cells[2].outputs[0].text
    copied = page[page.index(f'class="{CLASS}') :]
    (table,) = pd.read_html(io.StringIO(copied), index_col=0)
    assert table.loc["atomic experts"].tolist() == [16, 4, "75.0%"]
    assert "heapr, 0.75 of the atoms" in page
    assert "0.25 of the atoms" not in page
    normalise(notebook)
    outputs = notebook.cells[1].outputs
    assert not any(WIDGET in output.data for output in outputs)
    copy = outputs[-1].data["text/html"]
    assert copy.startswith(f'<div class="{CLASS}">')
    assert len(pictures(copy)) == 1
