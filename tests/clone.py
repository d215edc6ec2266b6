"""A copy of what is tracked, with nothing beside it, as a new user has it."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from processes import says

CLOSED = "http://127.0.0.1:9"
"""An address where nothing listens."""


@dataclass(frozen=True)
class Clone:
    """A copy of the repository, with a cache, and what the main job said in it."""

    folder: Path
    cache: Path
    output: str = ""

    @property
    def figures(self) -> Path:
        """Where the figures of the run are."""
        return self.folder / "figures" / "lab-small"

    def run(self, *arguments: str, timeout: float | None = None) -> str:
        """What Python says, which has to succeed."""
        env = bare_environment(self.folder, cache=self.cache)
        return says(*arguments, cwd=self.folder, env=env, timeout=timeout)

    def git(self, *arguments: str) -> str:
        """What git says."""
        return git(self.folder, *arguments)


def git(folder: Path, *arguments: str) -> str:
    """What git says in a folder."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def copy_tracked(source: Path, target: Path) -> None:
    """Copy what git tracks or would track."""
    listing = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, git(source, *listing).split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def bare_environment(folder: Path, *, cache: Path) -> dict[str, str]:
    """Our environment, without variables that this package or hub clients read."""
    ours = ("HEAPR_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "OMP_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return kept | {
        "HEAPR_CACHE_DIR": str(cache),
        "HEAPR_LAB_PROGRESS": "0",
        "HF_ENDPOINT": CLOSED,
        "HF_HOME": str(cache / "hub"),
        "PYTHONPATH": str(folder),
    }
