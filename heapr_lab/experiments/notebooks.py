"""Executing notebooks without JupyterLab, so that committed outputs are reproducible.

A notebook is executed in its own kernel and folder, with the values of its `parameters`
cell replaced, and written in a normal form: the same sources, inputs and installed
packages give the same bytes. Digests of the sources and inputs in its metadata, under
`heapr_lab`, show whether it has to be executed again.
"""

import ast
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.progress import Progress
from heapr_lab.storage import files, paths
from heapr_lab.storage.hashing import digest

MARK = "heapr_lab"
"""Key of a notebook's metadata with the digests it was executed from."""
NOT_COMPARABLE = "not comparable (other model and data)"
PARAMETERS_TAG = "parameters"
TIMEOUT_SECONDS = 1800
"""For one cell."""

_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_WIDGET = "application/vnd.jupyter.widget-view+json"
_OF_ONE_PANEL = re.compile(r"(?<=heapr-copy) heapr-copy-[0-9a-f]{32}")
"""The class by which a panel hides its copy; each panel makes up another one."""

logger = logging.getLogger(__name__)


# --- running ----------------------------------------------------------------------


def execute_notebook(
    path: Path | str,
    *,
    parameters: Mapping[str, Any],
    inputs: str = "",
    output: Path | str | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Path:
    """Execute one notebook from top to bottom and write it atomically.

    Args:
        path: the notebook; it runs in its folder.
        parameters: values for names that its `parameters` cell assigns.
        inputs: digest of what the outputs depend on besides the sources; recorded.
        output: where the executed notebook is written; by default in place.
        timeout: seconds for one cell.

    Returns:
        Path of the executed notebook.

    Raises:
        HeaprLabError: a cell failed; the file is unchanged.
    """
    path = Path(path)
    target = path if output is None else Path(output)
    notebook = _prepared(path, parameters)
    _run(notebook, path=path, timeout=timeout)
    normalise(notebook, name=path.name)
    notebook.metadata[MARK] = _record(notebook, inputs)
    with files.replacing(target) as temporary:
        text = nbformat.writes(notebook, version=4)
        temporary.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    return target


def execute_all(
    folder: Path | str,
    *,
    parameters: Mapping[str, Any],
    inputs: str = "",
    output: Path | str | None = None,
    timeout: float = TIMEOUT_SECONDS,
    force: bool = False,
    executor: Executor | None = None,
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
        timeout: as `execute_notebook`.
        force: also execute those that are up to date.
        executor: executes them in parallel; None executes them one by one here.
        progress: called with (notebooks done, notebooks in all).

    Returns:
        The notebooks that were executed, in order of name.

    Raises:
        HeaprLabError: notebooks failed; each is named with its cell, and its file is
            unchanged.
    """
    found = sorted(Path(folder).glob("*.ipynb"))
    targets = {path: Path(output or folder) / path.name for path in found}
    stale = [
        path
        for path in found
        if force or not _up_to_date(path, targets[path], parameters, inputs)
    ]
    execute = functools.partial(
        execute_notebook, parameters=parameters, inputs=inputs, timeout=timeout
    )
    calls = {
        path: functools.partial(execute, path, output=targets[path])
        for path in reversed(stale)  # the last ones take longest
    }
    failures = {}
    for through, (path, failure) in enumerate(_outcomes(calls, executor), start=1):
        if failure is not None:
            failures[path] = failure
        if progress is not None:
            progress(len(found) - len(stale) + through, len(found))
    if failures:
        raise HeaprLabError(
            f"{len(failures)} of {len(stale)} notebooks failed:\n"
            + "\n\n".join(failures[path] for path in sorted(failures))
        )
    return [targets[path] for path in stale]


def _up_to_date(
    path: Path, target: Path, parameters: Mapping[str, Any], inputs: str
) -> bool:
    try:
        return _recorded(target) == _record(_prepared(path, parameters), inputs)
    except HeaprLabError:  # raised again when it is executed
        return False


def _outcomes(
    calls: Mapping[Path, Callable[[], Path]], executor: Executor | None
) -> Iterator[tuple[Path, str | None]]:
    """Each notebook when it is finished, with the error if it failed."""
    if executor is None:
        for path, call in calls.items():
            yield path, _failure(call)
        return
    futures = {executor.submit(_failure, call): path for path, call in calls.items()}
    for future in as_completed(futures):
        yield futures[future], future.result()


def _failure(call: Callable[[], Path]) -> str | None:
    try:
        call()
    except HeaprLabError as error:
        return str(error)
    return None


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


def _prepared(path: Path, parameters: Mapping[str, Any]) -> nbformat.NotebookNode:
    notebook = read_notebook(path)
    replace_parameters(notebook, parameters, name=path.name)
    return notebook


def _run(notebook: nbformat.NotebookNode, *, path: Path, timeout: float) -> None:
    """Execute the cells of `notebook` and store their outputs in it.

    Raises:
        HeaprLabError: a cell failed, took too long, or ended the kernel.
    """
    from nbclient.exceptions import (
        CellControlSignal,
        CellExecutionError,
        DeadKernelError,
    )

    started = [0]
    client = _client(notebook, path, timeout)
    client.on_cell_start = lambda **event: started.append(event["cell_index"])
    try:
        client.execute(env=_environment())
    except CellExecutionError as error:
        what = f"{error.ename}: {error.evalue}"
    except (CellControlSignal, DeadKernelError, TimeoutError) as error:
        what = str(error)
    else:
        return
    raise HeaprLabError(
        f"{path.name}, cell {started[-1] + 1} failed: {what}\nThe cell:\n"
        f"{notebook.cells[started[-1]].source}\n"
        "The file is unchanged; run the notebook in JupyterLab for details"
    )


def _client(notebook: nbformat.NotebookNode, path: Path, timeout: float) -> Any:
    """A client that runs `notebook` in a new kernel of this Python, in its folder."""
    # Imported here because they are slow and not needed if all is up to date.
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisPython(AsyncKernelManager):
        """Kernels of the running Python, not of the registered `python3` kernel."""

        @property
        def kernel_spec(self) -> KernelSpec:
            options = ["--HistoryManager.enabled=False", "--log-level=ERROR"]
            return KernelSpec(**get_kernel_dict(extra_arguments=options))

    return NotebookClient(
        notebook,
        kernel_manager_class=ThisPython,
        timeout=timeout,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )


def _environment() -> dict[str, str]:
    """The environment of a kernel: inline figures, no progress bars, fixed hashes.

    Panels open as they are for everybody, without the last session on this machine.
    """
    inherited = os.environ.get("PYTHONPATH")
    folders = [str(paths.project_dir()), *([inherited] if inherited else [])]
    return os.environ | {
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
    if not path.exists():
        return None
    notebook = read_notebook(path)
    record = dict(notebook.metadata.get(MARK, {}))
    # It may have been edited since.
    unchanged = record.get("sources") == sources_digest(notebook)
    return record if unchanged else None


def replace_parameters(
    notebook: nbformat.NotebookNode, parameters: Mapping[str, Any], *, name: str
) -> None:
    """Replace the literals that the cell tagged `parameters` assigns.

    Args:
        notebook: changed in place.
        parameters: a string, number, bool or None for each name.
        name: name of the notebook in errors.

    Raises:
        SpecError: there is not exactly one such cell, it contains anything but literal
            assignments, or it does not assign one of the names.
    """
    cell = _parameters_cell(notebook, name=name)
    places = _assignments(cell.source, name=name)
    unknown = sorted(set(parameters) - set(places))
    if unknown:
        raise SpecError(
            f"{name} has no parameter {', '.join(unknown)}; its parameters are "
            f"{', '.join(places)}"
        )
    lines = cell.source.splitlines()
    for key, value in parameters.items():
        place = places[key]
        line = lines[place.lineno - 1].encode()
        lines[place.lineno - 1] = (
            line[: place.col_offset].decode()
            + _literal(value)
            + line[place.end_col_offset :].decode()
        )
    cell.source = "\n".join(lines)


def _parameters_cell(
    notebook: nbformat.NotebookNode, *, name: str
) -> nbformat.NotebookNode:
    cells = [
        cell
        for cell in notebook.cells
        if PARAMETERS_TAG in cell.metadata.get("tags", [])
    ]
    if len(cells) != 1:
        raise SpecError(
            f"{name} has {len(cells)} cells tagged {PARAMETERS_TAG!r}, expected one; "
            "tag the cell that assigns MODEL and PROFILE"
        )
    cell: nbformat.NotebookNode = cells[0]
    return cell


def _assignments(source: str, *, name: str) -> dict[str, ast.Constant]:
    places = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=key)], value=ast.Constant() as place):
                places[key] = place
            case _:
                raise SpecError(
                    f"line {statement.lineno} of the parameters of {name} is "
                    f"{ast.unparse(statement)!r}, expected NAME = literal; move it to "
                    "another cell"
                )
    return places


def _literal(value: Any) -> str:
    # JSON strings are Python literals, in the double quotes of the formatter.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


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
            output.metadata = nbformat.from_dict({})
        if output.get("data") == {}:
            continue
        kept.append(output)
    return kept


# --- tables in notebooks ----------------------------------------------------------


def beside_paper(rows: Mapping[str, tuple[Any, Any]]) -> pd.DataFrame:
    """The paper's values beside ours, labelled as not comparable.

    Args:
        rows: {quantity: (the paper's, ours)}.

    Returns:
        Columns quantity, paper, ours, comparison.

    Example:
        >>> beside_paper({"sequences": (128, 8)}).loc[0, "ours"]
        8
    """
    frame = pd.DataFrame(
        [(quantity, *values) for quantity, values in rows.items()],
        columns=["quantity", "paper", "ours"],
        dtype=object,  # a column may mix counts, shares and text
    )
    return frame.assign(comparison=NOT_COMPARABLE)


def what_was_found(findings: Mapping[str, tuple[Any, bool]]) -> pd.DataFrame:
    """Findings that hold for one model and text and need not hold for others.

    Counts and ranges must hold for every model and are asserted; a finding is reported
    and raises no error if it does not hold.

    Args:
        findings: {finding: (the measured value, whether it holds)}.

    Returns:
        Columns finding, found, holds here.

    Example:
        >>> what_was_found({"scores differ tenfold": (12.5, True)}).loc[0, "holds here"]
        'yes'
    """
    rows = [
        (finding, found, "yes" if holds else "no")
        for finding, (found, holds) in findings.items()
    ]
    columns = ["finding", "found", "holds here"]
    return pd.DataFrame(rows, columns=columns, dtype=object)
