"""`notebooks`: parameters, normalising, and what is run when."""

import sys
from pathlib import Path

import nbformat
import pytest
from heard import Heard
from nbformat.v4 import new_code_cell, new_notebook, new_output

from heapr_lab.errors import HeaprLabError
from heapr_lab.experiments.notebooks import (
    execute_all,
    execute_notebook,
    normalise,
    read_notebook,
    sources_digest,
)
from heapr_lab.experiments.workers import cores


def _notebook(*sources: str) -> nbformat.NotebookNode:
    cells = [new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = ["parameters"]
    return new_notebook(cells=cells)


def _written(folder: Path, *sources: str, name: str = "a.ipynb") -> Path:
    path = folder / name
    path.write_text(nbformat.writes(_notebook(*sources)), encoding="utf-8")
    return path


# --- normalising: what differs between runs goes, what a cell says stays -----------


def test_normalised_outputs():
    """Pieces of stdout join, stderr, views, timings and versions go."""
    notebook = _notebook("1")
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1f"}}
    notebook.cells[0].metadata["execution"] = {"iopub.execute_input": "now"}
    notebook.cells[0].outputs = [
        new_output("stream", name="stdout", text="one "),
        new_output("stream", name="stderr", text="Loading 10 %"),
        new_output("stream", name="stdout", text="two"),
        new_output("display_data", view),
        new_output("display_data", {**view, "text/plain": "Panel()"}),
    ]
    notebook.metadata = nbformat.from_dict(
        {"widgets": {"state": {}}, "language_info": {"version": "3.11.9"}}
    )
    normalise(notebook)
    cell = notebook.cells[0]
    assert cell.metadata == {"tags": ["parameters"]}
    assert [output.get("text") for output in cell.outputs] == ["one two", None]
    assert cell.outputs[1].data == {"text/plain": "Panel()"}
    assert notebook.metadata.language_info == {"name": "python"}
    assert "widgets" not in notebook.metadata


# --- executing: notebooks that need nothing but a kernel ---------------------------


def test_runs_with_parameters_and_records_what_it_ran(tmp_path):
    """Outputs, sources and inputs stand in the file; the kernel waits for no port."""
    told = "from ipykernel.kernelapp import IPKernelApp as App\nimport os\n"
    told += "print(A, os.getcwd(), App.instance().transport)"
    path = _written(tmp_path, 'A = "a"\nB = "b"', told)
    word = 'größe "b"\\c'
    execute_notebook(path, parameters={"A": word, "B": "b"}, inputs="abc")
    notebook = read_notebook(path)
    assert notebook.cells[0].source == 'A = "größe \\"b\\"\\\\c"\nB = "b"'
    transport = "tcp" if sys.platform == "win32" else "ipc"
    assert notebook.cells[1].outputs[0].text == f"{word} {tmp_path} {transport}\n"
    assert notebook.metadata.heapr_lab == {
        "sources": sources_digest(notebook),
        "inputs": "abc",
    }


def test_a_cell_that_hangs_is_named(tmp_path, monkeypatch):
    """The time limit is for one cell, and ends the run."""
    monkeypatch.setattr("heapr_lab.experiments.notebooks.TIMEOUT_SECONDS", 2)
    path = _written(tmp_path, "A = 0", "import time\ntime.sleep(600)")
    with pytest.raises(HeaprLabError, match=r"(?s)cell 2 failed: .*timed out"):
        execute_notebook(path, parameters={"A": ""})


def test_only_what_changed_is_executed(tmp_path):
    """Sources, parameters and inputs each bring a notebook back."""
    path = _written(tmp_path, "A = 1", "A")
    seen = Heard()
    settings = {"parameters": {"A": "1"}, "inputs": "x"}
    assert execute_all(tmp_path, **settings, progress=seen) == [path]
    first = path.read_bytes()
    assert execute_all(tmp_path, **settings) == []
    assert execute_all(tmp_path, **settings, force=True) == [path]
    assert path.read_bytes() == first
    assert seen == [(1, 1)]
    assert execute_all(tmp_path, parameters={"A": "1"}, inputs="y") == [path]
    assert execute_all(tmp_path, parameters={"A": "2"}, inputs="y") == [path]
    edited = read_notebook(path)
    edited.cells[1].source = "A * 2"
    path.write_text(nbformat.writes(edited), encoding="utf-8")
    assert execute_all(tmp_path, parameters={"A": "2"}, inputs="y") == [path]


def test_one_that_fails_keeps_none_from_running(tmp_path):
    """The others are written; all that failed are named, in order, at the end."""
    sources = {"a": "1 / len(A)", "b": "A", "c": "undefined", "d": "len(A)"}
    paths = {
        name: _written(tmp_path, "A = 0", source, name=f"{name}.ipynb")
        for name, source in sources.items()
    }
    before = paths["a"].read_bytes()
    seen = Heard()
    with pytest.raises(HeaprLabError) as error:
        execute_all(tmp_path, parameters={"A": ""}, n_kernels=2, progress=seen)
    message = str(error.value)
    assert message.startswith("2 of 4 notebooks failed:")
    assert message.index("a.ipynb, cell 2") < message.index("c.ipynb, cell 2")
    assert "ZeroDivisionError" in message
    assert "NameError" in message
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert paths["a"].read_bytes() == before
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())
    for name, text in {"b": "''", "d": "0"}.items():
        outputs = read_notebook(paths[name]).cells[1].outputs
        assert outputs[0].data["text/plain"] == text


def test_kernels_share_the_cores(tmp_path):
    """Each of several is told how many threads it may use."""
    threads = "import os\nos.environ.get('OMP_NUM_THREADS')"
    path = _written(tmp_path, "A = 0", threads)
    execute_all(tmp_path, parameters={"A": ""}, n_kernels=cores())
    outputs = read_notebook(path).cells[1].outputs
    assert outputs[0].data["text/plain"] == "'1'"


def test_what_is_no_notebook_is_named(tmp_path):
    """A damaged file is an error with its name."""
    path = tmp_path / "a.ipynb"
    path.write_text("{")
    with pytest.raises(HeaprLabError, match=r"a.ipynb is not a notebook"):
        execute_all(tmp_path, parameters={})
