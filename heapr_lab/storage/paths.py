"""The folders of the project and of the cache, and errors of the disk in one line."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from heapr_lab.errors import SpecError

_LONGEST_SOCKET: Final = 103
"""Bytes that the path of a socket may have on all systems."""
_NUMBER = re.compile(r"\(os error (\d+)\)")


def path_of(name: Path | str) -> Path:
    """The path that somebody typed, with `~` as a folder.

    Raises:
        SpecError: it begins with the home of a user who is not known here.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise SpecError(
            f"{name} is in the home of an unknown user: write ~/ for your own"
        ) from error


def cache_dir() -> Path:
    """`$HEAPR_CACHE_DIR`, else `heapr_lab` in the user's cache folder."""
    chosen = os.environ.get("HEAPR_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "heapr_lab"


def cached_folders(kind: str, name: str) -> Iterator[Path]:
    """Folders of that name that `cached_folder` made before, whatever their key."""
    return (cache_dir() / kind).glob(f"*/{name}")


def project_dir() -> Path:
    """The folder that holds `heapr_lab/`, `data/`, `figures/` and `notebooks/`."""
    return Path(__file__).resolve().parents[2]


def lab_model_dir(recipe: str = "bundled") -> Path:
    """The folder of the lab model that a recipe of `benchmarks.lab_model` trains."""
    name = "lab_moe" if recipe == "bundled" else f"lab_{recipe}"
    return project_dir() / "data" / name


def figures_dir() -> Path:
    """The folder of the committed figures."""
    return project_dir() / "figures"


def kernel_transport(folder: Path, *, n_added: int) -> str:
    """How a Jupyter kernel is reached: "ipc" by sockets in a folder, "tcp" by ports.

    Jupyter chooses free ports before a kernel takes them. Where another process takes
    one in between, the kernel never answers. There are ports only where a system has no
    such sockets, or their paths would be too long for it.

    Args:
        folder: the folder.
        n_added: the most characters that the name of a socket adds to its path.
    """
    fits = len(os.fsencode(folder)) + n_added <= _LONGEST_SOCKET
    return "ipc" if fits and sys.platform != "win32" else "tcp"


# --- errors -----------------------------------------------------------------------


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Errors of the disk while `path` is written become one that says what to do.

    Raises:
        SpecError: it cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        line = disk_error(error, path) or f"{path} could not be written ({error})"
        raise SpecError(line) from error


def disk_error(error: BaseException, path: Path | None = None) -> str | None:
    """One line for an error of the system; None for another error.

    Args:
        error: any error; safetensors has one of its own, which names the system's.
        path: what was read or written, if the error does not name it.
    """
    if isinstance(error, OSError):
        return (
            f"{_what(error, path)}: correct this and start again, or choose another "
            "place for the results (--out, where the command has it), or "
            f"$HEAPR_CACHE_DIR (now {cache_dir()}) for the cache"
        )
    number = _NUMBER.search(str(error))
    if isinstance(error, SafetensorError) and number:
        cause = OSError(int(number[1]), os.strerror(int(number[1])))
        return disk_error(cause, path)
    return None


def _what(error: OSError, path: Path | None) -> str:
    if error.strerror is None:
        return str(error)
    places = [name for name in (path, error.filename, error.filename2) if name]
    return f"{error.strerror}: {places[-1]}" if places else error.strerror
