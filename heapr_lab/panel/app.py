"""The panel without Python: by `%heapr` in a notebook, and as a page.

A page is served by Voilà on this machine only, behind a token. Voilà runs one notebook,
which is written to a temporary folder, in a kernel of this Python for each page that is
opened, and ends it when that page is closed. A content security policy keeps the
browser from contacting any other machine. Importing this needs no torch.
"""

import functools
import importlib.util
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from heapr_lab.errors import SpecError
from heapr_lab.models.named import folder_here, folder_of, names
from heapr_lab.models.safetensors_headers import check_there
from heapr_lab.models.sources import weights_bytes
from heapr_lab.storage.paths import cached_folders, kernel_transport

if TYPE_CHECKING:
    from voila.app import Voila

_MAGIC = "heapr"
_INLINE = {None, "inline", "module://matplotlib_inline.backend_inline"}
_USAGE = "%heapr lab, %heapr importance.parquet, or %heapr NAME of a table or workbench"
HOST: Final = "127.0.0.1"
_TEMPLATE = Path(__file__).parent / "app_template"
# Voilà's scripts and styles are inline, and widgets are compiled in the page. A kernel
# may be reached through a forwarded port, which has either name in the browser.
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob: "
    "ws://127.0.0.1:* ws://localhost:*; frame-ancestors 'self'"
)
# Extensions that were made for the installed JupyterLab need not load in Voilà.
_EXTENSIONS = [
    "@jupyter-widgets/jupyterlab-manager",
    "@voila-dashboards/widgets-manager8",
    "anywidget",
]
_IDLE = {"cull_idle_timeout": 1800, "cull_interval": 60}
"""Seconds after which a kernel that no page uses and no job runs in ends, and between
looks: a browser that is killed, or loses the connection, does not end its kernel."""
_AGAIN = """\
This model is open in another page. This page loads it again, which takes the memory of
its files once more, {size} (twice that where bfloat16 is computed in float32):
close the pages that you do not need."""
_SOCKET = 65
"""Characters that Voilà and Jupyter add to a folder for a kernel's sockets."""
_SLOW = ("rfc3987_syntax", "chardet")
"""The first compiles a grammar for 1.5 s when it is imported, to check addresses that
have letters of other alphabets, the second compiles many expressions, to guess how
bytes are encoded; those who import them go on without them."""


def load(ipython: Any) -> None:
    """Register `%heapr`, and in a kernel show figures in cells by default."""

    def explore_line(line: str) -> Any:
        """Explore a model, a table of `heapr-lab score`, or a variable."""
        from heapr_lab.panel.opening import explore

        return explore(source_of(line, ipython.user_ns))

    ipython.register_magic_function(explore_line, "line", _MAGIC)
    if getattr(ipython, "kernel", None) is not None and _undecided():
        # A preset inline backend has not yet set how IPython shows figures.
        ipython.run_line_magic("matplotlib", "inline")


def unload(ipython: Any) -> None:
    """Remove `%heapr`; the way figures are shown does not change."""
    ipython.magics_manager.magics["line"].pop(_MAGIC, None)


def source_of(line: str, variables: Mapping[str, Any]) -> Any:
    """The argument of `%heapr`: a variable, else the name of a model or a file.

    Args:
        line: one name or path, with or without quotes.
        variables: the variables of the notebook.

    Raises:
        SpecError: the line is empty.

    Example:
        >>> source_of("table", {"table": 7}), source_of("'a b.parquet'", {})
        (7, 'a b.parquet')
    """
    name = line.strip().strip("'\"")
    if not name:
        raise SpecError(f"%heapr needs an argument: {_USAGE}")
    return variables.get(name, name)


def _undecided() -> bool:
    import matplotlib as mpl

    return mpl.get_backend(auto_select=False) in _INLINE


# --- as a page ------------------------------------------------------------------------


def panel_source(
    source: str, *, profile: str | None, device: str, dtype: str, folder: Path
) -> str:
    """Python that shows the panel of `source`.

    Args:
        source: a table's file, ending in `.parquet`, or a model: `lab`, a folder, or a
            hub id, whose files are downloaded now.
        profile: as `open_workbench`.
        device: as `open_workbench`.
        dtype: as `open_workbench`.
        folder: the names of the files that the panel writes are relative to it.

    Raises:
        SpecError: there is no such table, model or profile, or a folder's config.json
            is missing or damaged.
        CacheError: the file is not a table.
    """
    if source.endswith(".parquet"):
        show = f"from heapr_lab import explore\nexplore({_of_table(Path(source))})"
    else:
        if profile is not None:
            from heapr_lab.workbench.settings import profile_of

            profile_of(source, profile)
        options = f"profile={profile!r}, device={device!r}, dtype={dtype!r}"
        show = "from heapr_lab.panel.opening import opened\n"
        show += f"opened({_of_model(source)!r}, {options})"
    lines = [
        "import os",
        f"os.chdir({str(folder)!r})",
        "os.environ['HEAPR_LAB_PROGRESS'] = '0'",  # the page has bars of its own
        show,
    ]
    return "\n".join(lines)


def _of_table(path: Path) -> str:
    from heapr_lab.panel.opening import table_at

    table_at(path)
    return repr(str(path.absolute()))


def _of_model(source: str) -> str:
    """The name of a model in another folder; what is not here is fetched now."""
    if source in names() and any(cached_folders("models", source)):
        return source  # made before; its kernel checks it, which imports torch
    check_there(source)
    if folder_of(source) is not None:
        return source
    if Path(source).is_dir():
        return str(Path(source).absolute())
    from heapr_lab.models.loading import model_folder

    model_folder(source)
    return source


def serve(
    code: str, *, source: str, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve what `code` displays as a page, until the process is stopped.

    Args:
        code: Python, run for each page that is opened.
        source: the model or the table that it shows.
        port: the port of `HOST`; 0 chooses a free one.
        on_ready: called with the address and its token once the server answers.

    Raises:
        SpecError: Voilà is not installed, or the port is taken.
    """
    if importlib.util.find_spec("voila") is None:
        raise SpecError(
            "the app needs Voilà, which is not installed: pip install -e '.[app]'"
        )
    for name in _SLOW:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    import nbformat
    from tornado.ioloop import IOLoop

    port, token = _free_port(port), secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="heapr-lab-") as folder:
        notebook = Path(folder) / "heapr-lab.ipynb"
        cells = [nbformat.v4.new_code_cell(code)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
        server = _server(notebook, source, port=port, token=token)
        # The loop runs once the server listens.
        IOLoop.current().add_callback(on_ready, f"http://{HOST}:{port}/?token={token}")
        server.start()


def _this_python() -> type:
    """The kernel of the running Python, not the one that is registered by its name."""
    from ipykernel import kernelspec
    from jupyter_client.kernelspec import (
        NATIVE_KERNEL_NAME,
        KernelSpec,
        KernelSpecManager,
    )

    class ThisPython(KernelSpecManager):
        def find_kernel_specs(self) -> dict[str, str]:
            return {NATIVE_KERNEL_NAME: kernelspec.RESOURCES}

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:  # noqa: ARG002
            quiet = ["--log-level=ERROR"]
            return KernelSpec(**kernelspec.get_kernel_dict(extra_arguments=quiet))

    return ThisPython


def _server(notebook: Path, source: str, *, port: int, token: str) -> "Voila":
    """Voilà for one notebook, without its configuration files."""
    from traitlets.config import Config
    from voila.app import Voila

    settings: dict[str, Any] = {
        "allow_template_override": "NO",
        "extension_allowlist": _EXTENSIONS,
        "kernel_spec_manager_class": _this_python(),
        "prelaunch_hook": functools.partial(_prepare, source),
        "show_tracebacks": True,
    }
    server = Voila(
        config=Config(
            VoilaConfiguration=settings,
            MappingKernelManager=_IDLE,
            KernelManager={
                "transport": kernel_transport(notebook.parent, n_added=_SOCKET)
            },
        ),
        config_file_paths=[],
        notebook_path=str(notebook),
        connection_dir_root=str(notebook.parent),
        ip=HOST,
        port=port,
        port_retries=0,
        token=token,
        open_browser=False,
        log_level="ERROR",
        tornado_settings={"headers": {"Content-Security-Policy": _POLICY}},
    )
    server.initialize([])
    server.template_paths.insert(0, str(_TEMPLATE))
    return server


def _prepare(source: str, page: Any, notebook: Any, cwd: str) -> None:  # noqa: ARG001
    """Let a page end its kernel, and say what it needs if the model is open already."""
    page.xsrf_token  # noqa: B018 (sets the cookie that the page sends when it closes)
    kernels = page.kernel_manager
    others = map(kernels.get_kernel, kernels.list_kernel_ids())
    if all(kernel.shutting_down for kernel in others):
        return
    if size := _bytes_of(source):
        from nbformat.v4 import new_markdown_cell

        from heapr_lab.panel.answer import compact

        said = _AGAIN.format(size=compact(size, "B"))
        notebook.cells.append(new_markdown_cell(said))


def _bytes_of(source: str) -> int:
    """Size of the files of a model; 0 for a table, and where they are not found."""
    folder = folder_here(source)
    return 0 if folder is None else weights_bytes(folder)


def _free_port(port: int) -> int:
    with socket.socket() as probe:
        if sys.platform != "win32":
            # Else a port that was just released counts as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise SpecError(
                f"port {port} is not available: {error}; give another --port, or 0 "
                "for a free one"
            ) from error
        return int(probe.getsockname()[1])
