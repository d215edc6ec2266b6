"""The main job as a stranger runs it: no data, no variable, a hub that refuses.

`pydocs` is a part of the two packages that a notebook names: all take a minute.
"""

import dataclasses
import re
from pathlib import Path

import pytest
from clone import Clone, copy_tracked

from heapr_lab.storage import paths

TIMEOUT_SECONDS = 1080
"""The limit on two busy cores; some three minutes are enough on idle ones."""


def with_little_text(path: Path) -> None:
    """Let the module harvest every eighth file of two packages."""
    few = {
        r"^PYDOCS_PACKAGES = \(.*?^\)": 'PYDOCS_PACKAGES = ("stdlib", "torch")',
        r"sorted\(root\.rglob\(\"\*\.py\"\)\)": r"\g<0>[::8]",
    }
    text = path.read_text("utf-8")
    for all_of_them, some in few.items():
        text, n = re.subn(all_of_them, some, text, flags=re.M | re.S)
        assert n == 1
    path.write_text(text, "utf-8")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory) -> Clone:
    """`heapr-lab reproduce` on the small profile in a fresh repository."""
    root = tmp_path_factory.mktemp("stranger")
    clone = Clone(root / "heapr-lab", root / "cache")
    copy_tracked(paths.project_dir(), clone.folder)
    with_little_text(clone.folder / "heapr_lab" / "text" / "pydocs.py")
    clone.git("init", "--quiet")
    clone.git("add", "--all")
    author = ("-c", "user.name=stranger", "-c", "user.email=stranger@example.org")
    clone.git(*author, "commit", "--quiet", "--message", "as cloned")
    job = ("-m", "heapr_lab", "reproduce", "--profile", "small", "--workers", "2")
    return dataclasses.replace(clone, output=clone.run(*job, timeout=TIMEOUT_SECONDS))
