"""The main job as a stranger runs it: no data, no variable, a hub that refuses."""

import dataclasses

import pytest
from clone import Clone, copy_tracked

from heapr_lab.storage import paths

TIMEOUT_SECONDS = 1080
"""On two busy cores; some three minutes on idle ones."""


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """`heapr-lab reproduce` on the small profile in a fresh repository."""
    root = tmp_path_factory.mktemp("stranger")
    clone = Clone(root / "heapr-lab", root / "cache")
    copy_tracked(paths.project_dir(), clone.folder)
    clone.git("init", "--quiet")
    clone.git("add", "--all")
    author = ("-c", "user.name=stranger", "-c", "user.email=stranger@example.org")
    clone.git(*author, "commit", "--quiet", "--message", "as cloned")
    job = ("-m", "heapr_lab", "reproduce", "--profile", "small", "--workers", "2")
    return dataclasses.replace(clone, output=clone.run(*job, timeout=TIMEOUT_SECONDS))
