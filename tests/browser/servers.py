"""JupyterLab and the app as processes of their own, with folders of their own."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import nbformat

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _BROWSERS)), None)
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\S*token=[\w-]+")
_SECONDS_TO_START = 120
_SECONDS_TO_STOP = 20
# No toast with news over the panel, no half-written notebooks, nothing left unrendered.
_LAB_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}
# Without it JupyterLab asks which kernel to start.
_KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
# The server asks no package index about versions and extensions either.
_LAB_OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port_retries=0",
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
    "--LabApp.expose_app_in_browser=True",  # its commands, as `jupyterapp`
    # A port that was free when it was chosen may be taken when the kernel wants it.
    "--KernelManager.transport=ipc",
    # Kernels of pages that were closed.
    "--MappingKernelManager.cull_idle_timeout=30",
    "--MappingKernelManager.cull_interval=10",
)


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that runs, for any number of notebooks."""

    address: str
    """Its address, with the token."""
    work: Path
    """The folder of the notebooks."""

    def notebook(self, name: str, cells: Sequence[str]) -> str:
        """The address of a new notebook whose code cells have these sources."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in cells],
            metadata=_KERNEL,
        )
        folder = self.folder(name)
        folder.mkdir()
        nbformat.write(notebook, folder / f"{name}.ipynb")
        return self.page(name, f"/tree/{name}/{name}.ipynb")

    def folder(self, name: str) -> Path:
        """The folder of a notebook, which its kernel works in, and no other one."""
        return self.work / name

    def page(self, name: str, path: str = "") -> str:
        """The address of a page with a layout of its own, which nothing is in yet."""
        url = urlsplit(self.address)
        path, query = f"/lab/workspaces/{name}{path}", f"reset&{url.query}"
        return url._replace(path=path, query=query).geturl()


@contextlib.contextmanager
def lab(*, private: Path, environment: Mapping[str, str]) -> Iterator[Lab]:
    """A JupyterLab.

    Args:
        private: an empty folder for everything that is written.
        environment: what the kernels are to see besides ours.
    """
    settings = private / "config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(_LAB_SETTINGS), encoding="utf-8")
    work = private / "notebooks"
    work.mkdir()
    command = ["jupyterlab", *_LAB_OPTIONS, f"--ServerApp.port={free_port()}"]
    command += [f"--ServerApp.root_dir={work}"]
    # The path of a socket has to be short.
    with tempfile.TemporaryDirectory(prefix="hl-") as runtime:
        variables = {**environment, "JUPYTER_RUNTIME_DIR": runtime}
        with served(command, private=private, environment=variables) as (address, _):
            yield Lab(address, work)


@contextlib.contextmanager
def served(
    command: Sequence[str], *, private: Path, environment: Mapping[str, str]
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A module run with arguments; the address that it prints, and the process."""
    log = private / "server.log"
    variables = os.environ | jupyter_folders(private) | environment
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=private,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield _address(log, process), process
        finally:
            stop(process)


def jupyter_folders(private: Path) -> dict[str, str]:
    """Variables that keep Jupyter and matplotlib out of the developer's folders."""
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    return {name: str(private / folder) for name, folder in folders.items()}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server, which ends its kernels."""
    process.terminate()
    try:
        process.wait(_SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    """The first address with a token that a server prints, once it answers there."""
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and process.poll() is None:
        match = _ADDRESS.search(log.read_text(encoding="utf-8"))
        if match is not None and _listens(match[0]):
            return match[0]
        time.sleep(0.1)
    raise RuntimeError(f"no server: {log.read_text(encoding='utf-8')[-3000:]}")


def _listens(address: str) -> bool:
    """Whether a server answers, which it may do a while after it said where."""
    url = urlsplit(address)
    try:
        socket.create_connection((url.hostname, url.port), timeout=1).close()
    except OSError:
        return False
    return True
