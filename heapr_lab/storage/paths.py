"""The folders of the project, and the folder of the cache."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LONGEST_SOCKET: Final = 103
"""Bytes that the path of a socket may have on all systems."""


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
