"""`%load_ext heapr_lab`: a kernel shows figures, and `%heapr` opens the panel."""

import os

import matplotlib as mpl
import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell
from processes import says

from heapr_lab.errors import SpecError
from heapr_lab.panel import app

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
def test_a_kernel_shows_figures_unless_told_otherwise(backend, shown, tmp_path):
    """Where nothing or inline was chosen a figure is a PNG; torch is not imported."""
    env = os.environ | {"IPYTHONDIR": str(tmp_path), "MPLBACKEND": backend}
    assert says("-c", _KERNEL, env=env).split() == ["False", str(shown)]


def test_the_extension_adds_a_magic_and_takes_it_away():
    """`%load_ext`, `%unload_ext`; in a terminal the backend stays undecided."""
    shell = InteractiveShell()
    before = mpl.get_backend(auto_select=False)
    shell.run_line_magic("load_ext", "heapr_lab")
    assert shell.find_line_magic("heapr") is not None
    assert mpl.get_backend(auto_select=False) == before
    shell.run_line_magic("unload_ext", "heapr_lab")
    assert shell.find_line_magic("heapr") is None


def test_the_magic_takes_a_variable_or_a_name():
    """A variable of the notebook is meant where there is one, else a model or file."""
    frame = pd.DataFrame()
    variables = {"table": frame}
    assert app.source_of(" table ", variables) is frame
    assert app.source_of("lab", variables) == "lab"
    assert app.source_of('"my table.parquet"', variables) == "my table.parquet"
    with pytest.raises(SpecError, match=r"needs an argument.*%heapr lab"):
        app.source_of("  ", variables)
