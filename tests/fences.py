"""What stands on a page of the documentation in a fence or a block, by its name.

HEAPR_UPDATE_README=1 writes the blocks anew, from what is committed; so does
`make publish`, from what it measures.
"""

import os
import re
from pathlib import Path

from benchmarks.readme import fill_blocks
from heapr_lab.storage import paths

UPDATE = os.environ.get("HEAPR_UPDATE_README") == "1"


def fence(page: str, name: str) -> str:
    """The code under "```NAME" on `page`, a path in the project; there is one such."""
    text = (paths.project_dir() / page).read_text("utf-8")
    (code,) = re.findall(rf"^```{name}\n(.*?)^```", text, re.M | re.S)
    return str(code)


def blocks(path: Path) -> dict[str, str]:
    """What stands between `<!-- name -->` and `<!-- end -->`, by name."""
    pattern = r"<!-- (\w+) -->(.*?)<!-- end -->"
    return dict(re.findall(pattern, path.read_text("utf-8"), re.DOTALL))


def updated(path: Path, made: dict[str, str]) -> dict[str, str]:
    """The blocks of a page, written anew where that is asked for."""
    if UPDATE:
        fill_blocks(path, made)
    return blocks(path)
