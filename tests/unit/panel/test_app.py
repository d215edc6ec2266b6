"""The panel without Python: `%heapr` in a notebook, and a page of its own."""

import importlib.util
import os
import socket
import sys
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest
from commands import one_line
from IPython.core.interactiveshell import InteractiveShell
from processes import says
from random_tables import small_table
from tiny_folder import write_model

from heapr_lab.errors import SpecError
from heapr_lab.panel import app
from heapr_lab.storage.paths import kernel_transport

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


# --- as a page ------------------------------------------------------------------------


def source(name: str, folder: Path) -> str:
    """The Python that shows the panel of `name`."""
    return app.panel_source(
        name, profile="small", device="cpu", dtype="float32", folder=folder
    )


def test_the_kernel_opens_the_model_that_was_asked_for(tmp_path, monkeypatch):
    """A folder is named in full, for the kernel starts elsewhere, with the options."""
    write_model(tmp_path / "moe")
    monkeypatch.chdir(tmp_path)
    code = source("moe", tmp_path)
    assert f"os.chdir({str(tmp_path)!r})" in code
    options = "profile='small', device='cpu', dtype='float32'"
    assert f"opened({str(tmp_path / 'moe')!r}, {options})" in code
    assert "opened('lab', " in source("lab", tmp_path)
    compile(code, "cell", "exec")


def test_the_kernel_opens_the_table_by_its_name(tmp_path, monkeypatch):
    """Which is whole, for the kernel starts elsewhere."""
    monkeypatch.chdir(tmp_path)
    small_table().write("table.parquet")
    code = source("table.parquet", tmp_path)
    assert f"explore({str(tmp_path / 'table.parquet')!r})" in code
    exec(code, {})


SERVE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from heapr_lab.panel import app
app.panel_source("lab", profile=None, device="cpu", dtype="auto", folder=Path("."))
kernels = SimpleNamespace(get_kernel=None, list_kernel_ids=list)
page = SimpleNamespace(xsrf_token="", kernel_manager=kernels)
app._prepare("lab", page, None, "")
print(*sorted({slow} & sys.modules.keys()))
"""


def test_a_page_waits_for_nothing_that_its_kernel_imports():
    """The server goes without numbers and widgets until its first kernel starts."""
    slow = {"IPython", "ipywidgets", "numpy", "pandas", "pyarrow", "torch"}
    code = SERVE.replace("{slow}", repr(slow))
    assert says("-c", code).strip() == ""


def test_without_voila_it_says_what_to_install(monkeypatch):
    """One line and exit status 2, as for every error that was foreseen."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(app, "panel_source", lambda *_, **__: "")
    assert "pip install -e '.[app]'" in one_line("app", "lab", "--no-browser")


def test_kernels_without_a_page_are_ended(tmp_path):
    """The server culls those that are idle and that no browser is connected to."""
    pytest.importorskip("voila")
    notebook = tmp_path / "page.ipynb"
    notebook.touch()
    server = app._server(notebook, "lab", port=0, token="token")
    server.connection_dir = str(tmp_path)
    kernels = server.init_settings()["kernel_manager"]
    assert 0 < kernels.cull_idle_timeout <= 3600
    assert not kernels.cull_connected


@pytest.mark.skipif(sys.platform == "win32", reason="has no such sockets")
@pytest.mark.parametrize(("length", "expected"), [(30, "ipc"), (60, "tcp")])
def test_kernels_wait_for_no_port(length, expected):
    """They have sockets in the app's folder, if its path is not too long for them."""
    folder = Path("/" + "x" * (length - 1))
    assert kernel_transport(folder, n_added=app._SOCKET) == expected


def test_a_port_that_is_taken_is_said(monkeypatch):
    """The port that was asked for is used, or none."""
    monkeypatch.setattr(app, "panel_source", lambda *_, **__: "")
    with socket.socket() as other:
        other.bind((app.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        message = one_line("app", "lab", "--no-browser", "--port", port)
    assert "give another --port" in message
