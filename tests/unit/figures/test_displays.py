"""Displays: every figure is its rows, its Axes, and a picture in a notebook."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import figure_rows as rows
import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell

from heapr_lab import figures
from heapr_lab.errors import SpecError
from heapr_lab.figures import KINDS, Display
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel import magic

PLOTS = {
    name.removeprefix("plot_") for name in dir(figures) if name.startswith("plot_")
}
OF_OTHER_ROWS = {"score_bins": "score_histogram", "width_cells": "widths"}
"""Plot functions, and the other one whose kind each of them shares."""


def display_of(kind: str) -> Display:
    """A display of each kind, made of small results."""
    results, savings = rows.evaluation_rows(), rows.saving_rows()
    widths = pd.DataFrame([[4, 0], [1, 3]], index=[1, 3])
    inputs: dict[str, tuple[Any, ...]] = {
        "atomic_expert": (),
        "bins": (rows.bins_frame(),),
        "boundary": (results, savings),
        "calibration_size": (results,),
        "granularity": (results, savings),
        "layer_ratios": ({0.25: rows.Keep(0.4, 0.1), 0.5: rows.Keep(0.7, 0.3)},),
        "main": (results,),
        "mask_diff": rows.scored_masks(),
        "scope": (results,),
        "score_histogram": (pd.Series([0.0, 1.0, 2.0], name="heapr"), 1.5),
        "widths": (widths, widths),
    }
    return Display.from_results(kind, *inputs[kind])


def test_every_plot_has_a_kind() -> None:
    """What can be plotted can be displayed, and nothing else."""
    assert {OF_OTHER_ROWS.get(name, name) for name in PLOTS} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_display_is_drawn_where_it_is_told(kind: str) -> None:
    """`plot(ax)` returns that Axes with something on it, and names its figure."""
    display = display_of(kind)
    assert isinstance(display.frame, pd.DataFrame)
    assert len(display.frame)
    figure, (ax, other) = plt.subplots(1, 2)
    assert display.plot(ax=ax) is ax
    assert ax.has_data() or ax.texts
    assert not other.has_data()
    assert display.figure_ is figure
    assert display.axes_ == [ax]


@pytest.mark.parametrize("kind", KINDS)
def test_a_display_shows_itself_without_pyplot(kind: str) -> None:
    """All panels as PNG, once, and no figure is left for a cell to show again."""
    display = display_of(kind)
    assert display._repr_png_().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert display.axes_ == display.figure_.axes


def test_a_panel_is_chosen_by_what_it_is_of() -> None:
    """Rows of several panels: the first, or the one that is asked for."""
    display = display_of("mask_diff")
    first, overlap, ranks = (
        ax.get_xlabel()
        for ax in (
            display.plot(),
            display.plot(shown="overlap"),
            display.plot(shown="ranks"),
        )
    )
    assert first == overlap != ranks
    with pytest.raises(SpecError, match=r"no panel with shown 'all'; expected one of "):
        display.plot(shown="all")
    main = display_of("main").plot(metric="accuracy")
    assert main.get_ylabel().startswith("accuracy kept")


def test_an_unknown_kind_names_those_there_are() -> None:
    """Both constructors do."""
    with pytest.raises(SpecError, match=r"no figure 'speed'; expected one of atomic_"):
        Display("speed", pd.DataFrame())
    with pytest.raises(SpecError, match="no figure 'speed'"):
        Display.from_results("speed")


def test_a_display_is_saved_with_its_rows(tmp_path: Path) -> None:
    """Picture, vector graphic and rows; the rows read back as they were."""
    display = display_of("layer_ratios")
    paths = display.save(tmp_path / "new" / "v1.5", provenance={"by": "me"})
    assert [path.name for path in paths] == ["v1.5.png", "v1.5.pdf", "v1.5.csv"]
    pd.testing.assert_frame_equal(pd.read_csv(paths[2]), display.frame)


# --- %load_ext heapr_lab ----------------------------------------------------------


_KERNEL = """
import sys
from IPython.core.interactiveshell import InteractiveShell

class Kernel(InteractiveShell):
    kernel = object()
    def enable_gui(self, gui=None):
        pass

shell = Kernel()
shell.run_line_magic("load_ext", "heapr_lab")
import matplotlib.figure
figure = matplotlib.figure.Figure()
figure.add_subplot()
data, _ = shell.display_formatter.format(figure)
print("torch" in sys.modules, "image/png" in data)
"""


@pytest.mark.parametrize(
    ("backend", "shown"),
    [("", True), ("module://matplotlib_inline.backend_inline", True), ("Agg", False)],
)
def test_a_kernel_shows_figures_unless_told_otherwise(
    backend: str, shown: bool, tmp_path: Path
) -> None:
    """Where nothing or inline was chosen a figure is a PNG; torch is not imported."""
    env = {"IPYTHONDIR": str(tmp_path), "MPLBACKEND": backend}
    process = subprocess.run(
        [sys.executable, "-c", _KERNEL],
        check=True,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert process.stdout.split() == ["False", str(shown)]


def test_the_extension_adds_a_magic_and_takes_it_away() -> None:
    """`%load_ext`, `%unload_ext`; in a terminal the backend stays undecided."""
    shell = InteractiveShell()
    before = mpl.get_backend(auto_select=False)
    shell.run_line_magic("load_ext", "heapr_lab")
    assert shell.find_line_magic("heapr") is not None
    assert mpl.get_backend(auto_select=False) == before
    shell.run_line_magic("unload_ext", "heapr_lab")
    assert shell.find_line_magic("heapr") is None


def test_the_magic_takes_a_variable_or_a_name() -> None:
    """A variable of the notebook is meant where there is one, else a model or file."""
    frame = pd.DataFrame()
    variables = {"table": frame}
    assert magic.source_of(" table ", variables) is frame
    assert magic.source_of("lab", variables) == "lab"
    assert magic.source_of('"my table.parquet"', variables) == "my table.parquet"
    with pytest.raises(SpecError, match=r"needs an argument.*%heapr lab"):
        magic.source_of("  ", variables)


def test_the_magic_explores_what_it_is_given() -> None:
    """`%heapr table` is the panel of that table."""
    columns = ["sum_h2", "sum_g2", "sum_hg2", "tokens"]
    numbers = pd.DataFrame(1.0, index=range(4), columns=columns)
    keys = {"layer": 0, "expert": [0, 0, 1, 1], "atom": [0, 1, 0, 1]}
    shell = InteractiveShell()
    shell.user_ns["table"] = ImportanceTable.from_frame(numbers.assign(**keys), N=2)
    shell.run_line_magic("load_ext", "heapr_lab")
    panel = shell.run_line_magic("heapr", "table")
    assert type(panel).__name__ == "Explorer"
