"""Executing notebooks without JupyterLab, so that committed outputs are reproducible.

A notebook is executed by nbclient in a kernel of its own, in its folder, with the
values of its `parameters` cell replaced, and written in a normal form: the same
sources, inputs and installed packages give the same bytes. Digests of the sources and
inputs in its metadata, under `heapr_lab`, show whether it has to be executed again.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import nbformat

from heapr_lab.errors import HeaprLabError
from heapr_lab.experiments.workers import threads_of
from heapr_lab.progress import Progress
from heapr_lab.storage import files, paths
from heapr_lab.storage.hashing import digest

MARK = "heapr_lab"
"""Key of a notebook's metadata with the digests it was executed from."""
PARAMETERS_TAG = "parameters"
TIMEOUT_SECONDS = 1800
"""The time limit of one cell."""

_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_WIDGET = "application/vnd.jupyter.widget-view+json"
_OF_ONE_PANEL = re.compile(r"(?<=heapr-copy) heapr-copy-[0-9a-f]{32}")
"""The class by which a panel hides its copy; each panel makes up another one."""
_TABLE = 'class="dataframe"'
"""A mark in the HTML of a frame, which is then not written as text as well."""

logger = logging.getLogger(__name__)


# --- running ----------------------------------------------------------------------


def execute_notebook(
    path: Path | str,
    *,
    parameters: Mapping[str, str],
    inputs: str = "",
    output: Path | str | None = None,
    threads: int | None = None,
) -> Path:
    """Execute one notebook from top to bottom and write it atomically.

    Args:
        path: the notebook; it runs in its folder.
        parameters: value of each name that its `parameters` cell assigns.
        inputs: digest of what the outputs depend on beside the sources; recorded.
        output: where the executed notebook is written; by default in place.
        threads: number that its kernel may use; None leaves it to torch.

    Returns:
        Path of the executed notebook.

    Raises:
        HeaprLabError: a cell failed; the file is unchanged.
    """
    path = Path(path)
    target = path if output is None else Path(output)
    notebook = _prepared(path, parameters)
    _run(notebook, path=path, threads=threads)
    normalise(notebook, name=path.name)
    notebook.metadata[MARK] = _record(notebook, inputs)
    with files.replacing(target) as temporary:
        text = nbformat.writes(notebook, version=4)
        temporary.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    return target


def execute_all(
    folder: Path | str,
    *,
    parameters: Mapping[str, str],
    inputs: str = "",
    output: Path | str | None = None,
    force: bool = False,
    n_kernels: int = 1,
    progress: Progress | None = None,
) -> list[Path]:
    """Execute the notebooks of a folder that are not up to date.

    A notebook is up to date if it was executed with the present sources, parameters and
    inputs. If one fails, the others are still executed.

    Args:
        folder: folder of the notebooks.
        parameters: as `execute_notebook`, for every notebook.
        inputs: as `execute_notebook`.
        output: folder of the executed notebooks; by default in place.
        force: also execute those that are up to date.
        n_kernels: number of notebooks at a time, which share the cores.
        progress: called with (notebooks done, notebooks in all).

    Returns:
        The notebooks that were executed, in order of name.

    Raises:
        HeaprLabError: something is not a notebook, or notebooks failed; each is named
            with its cell, and its file is unchanged.
    """
    targets = {
        path: Path(output or folder) / path.name
        for path in sorted(Path(folder).glob("*.ipynb"))
    }
    stale = [
        path
        for path, target in targets.items()
        if force or _recorded(target) != _record(_prepared(path, parameters), inputs)
    ]
    threads = threads_of(n_kernels) if n_kernels > 1 else None
    failures = {}

    def execute(path: Path) -> None:
        try:
            execute_notebook(
                path,
                parameters=parameters,
                inputs=inputs,
                output=targets[path],
                threads=threads,
            )
        except HeaprLabError as error:
            failures[path] = str(error)

    # Threads of this pool end with the process, whatever they wait for; the last
    # notebooks take longest.
    with ThreadPool(n_kernels) as pool:
        runs = pool.imap_unordered(execute, reversed(stale))
        for done, _ in enumerate(runs, start=len(targets) - len(stale) + 1):
            if progress is not None:
                progress(done, len(targets))
    failed = [failures[path] for path in stale if path in failures]
    if failed:
        raise HeaprLabError(
            f"{len(failed)} of {len(stale)} notebooks failed:\n" + "\n\n".join(failed)
        )
    return [targets[path] for path in stale]


def read_notebook(path: Path | str) -> nbformat.NotebookNode:
    """The notebook in a file.

    Raises:
        HeaprLabError: it is not a notebook.
    """
    try:
        notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise HeaprLabError(
            f"{path} is not a notebook: {error}; expected a .ipynb file"
        ) from error
    return notebook


def _prepared(path: Path, parameters: Mapping[str, str]) -> nbformat.NotebookNode:
    """The notebook in a file, its `parameters` cell written anew."""
    notebook = read_notebook(path)
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in parameters.items()
    ]
    for cell in notebook.cells:
        if PARAMETERS_TAG in cell.metadata.get("tags", []):
            cell.source = "\n".join(lines)
    return notebook


def _run(notebook: nbformat.NotebookNode, *, path: Path, threads: int | None) -> None:
    """Execute the cells of `notebook` and store their outputs in it.

    Raises:
        HeaprLabError: a cell failed, took too long, or ended the kernel.
    """
    # Imported here because it is slow and not needed if all is up to date.
    from nbclient import NotebookClient
    from nbclient.exceptions import (
        CellControlSignal,
        CellExecutionError,
        DeadKernelError,
    )

    started = [0]
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_SECONDS,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--HistoryManager.enabled=False", "--log-level=ERROR"],
    )
    client.on_cell_start = lambda **event: started.append(event["cell_index"])
    try:
        with _sockets(client.create_kernel_manager()):
            asyncio.run(client.async_execute(env=_environment(threads)))
    except CellExecutionError as error:
        what = f"{error.ename}: {error.evalue}"
    except (CellControlSignal, DeadKernelError) as error:
        what = str(error)
    else:
        return
    raise HeaprLabError(
        f"{path.name}, cell {started[-1] + 1} failed: {what}; the file is unchanged"
    )


@contextlib.contextmanager
def _sockets(kernel: Any) -> Iterator[None]:
    """Let a kernel be reached by sockets in a temporary folder, if that is possible."""
    with tempfile.TemporaryDirectory(prefix="heapr-lab-") as folder:
        file = Path(folder, "kernel.json")
        kernel.connection_file = str(file)
        kernel.transport = paths.kernel_transport(file, n_added=1)  # kernel-ipc-5
        yield


def _environment(threads: int | None) -> dict[str, str]:
    """The environment of a kernel: inline figures, no progress bars, fixed hashes.

    Panels open as they are for everybody, without the last session on this machine.
    """
    inherited = os.environ.get("PYTHONPATH")
    folders = [str(paths.project_dir()), *([inherited] if inherited else [])]
    return {
        **os.environ,
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        "HEAPR_LAB_PROGRESS": "0",
        "HEAPR_LAB_RESUME": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONHASHSEED": "0",
        # The notebooks run the code that executes them.
        "PYTHONPATH": os.pathsep.join(folders),
    }


# --- what a notebook was made from ------------------------------------------------


def sources_digest(notebook: nbformat.NotebookNode) -> str:
    """Digest of the type and source of every cell."""
    return digest([[cell.cell_type, cell.source] for cell in notebook.cells])


def _record(notebook: nbformat.NotebookNode, inputs: str) -> dict[str, str]:
    return {"sources": sources_digest(notebook), "inputs": inputs}


def _recorded(path: Path) -> dict[str, str] | None:
    """What an executed notebook was made from; None if it was edited since."""
    if not path.exists():
        return None
    notebook = read_notebook(path)
    record = dict(notebook.metadata.get(MARK, {}))
    return record if record.get("sources") == sources_digest(notebook) else None


# --- what is written --------------------------------------------------------------


def normalise(notebook: nbformat.NotebookNode, *, name: str = "notebook") -> None:
    """Remove everything from `notebook` that may differ between runs.

    These are timings, versions, widget states and views, and output to stderr, which is
    logged instead.
    """
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs = _normal_outputs(cell.outputs, name=name)
    notebook.metadata = nbformat.from_dict(_METADATA)


def _normal_outputs(
    outputs: list[nbformat.NotebookNode], *, name: str
) -> list[nbformat.NotebookNode]:
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stderr":
            logger.warning("%s wrote to stderr: %s", name, output.text.strip())
            continue
        if output.output_type == "stream" and kept and kept[-1].get("name") == "stdout":
            kept[-1].text += output.text  # the split depends on timing
            continue
        if "data" in output:
            output.data.pop(_WIDGET, None)
            if "text/html" in output.data:
                shown = output.data["text/html"]
                output.data["text/html"] = _OF_ONE_PANEL.sub("", shown)
                if _TABLE in shown:
                    output.data.pop("text/plain", None)
            output.metadata = nbformat.from_dict({})
        if output.get("data") == {}:
            continue
        kept.append(output)
    return kept
