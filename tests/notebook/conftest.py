"""The main job as a stranger runs it: no data, no variable, a hub that refuses."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clone import Clone, bare_environment, copy_tracked

from heapr_lab.storage import paths

TIMEOUT_SECONDS = 1080
"""On two busy cores; some three minutes on idle ones."""


@pytest.fixture(scope="session")
def stranger(session_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """`heapr-lab reproduce` on the small profile in a fresh repository.

    Only the docstrings of the packages, which take a minute to read, are shared with
    the other tests, whoever reads them first.
    """
    root = tmp_path_factory.mktemp("stranger")
    read, cache = session_cache / "pydocs", root / "cache"
    if read.is_dir():
        shutil.copytree(read, cache / "pydocs")
    clone = Clone(root / "heapr-lab", "")
    copy_tracked(paths.project_dir(), clone.folder)
    clone.git("init", "--quiet")
    clone.git("add", "--all")
    author = ("-c", "user.name=stranger", "-c", "user.email=stranger@example.org")
    clone.git(*author, "commit", "--quiet", "--message", "as cloned")
    command = [sys.executable, "-m", "heapr_lab", "reproduce", "--profile", "small"]
    run = subprocess.run(
        [*command, "--workers", "2"],
        cwd=clone.folder,
        env=bare_environment(clone.folder, cache=cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    shutil.copytree(cache / "pydocs", read, dirs_exist_ok=True)
    return Clone(clone.folder, run.stdout)
