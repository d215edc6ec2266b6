"""Code that stands on a page of the documentation, by the name of its fence."""

import re

from heapr_lab.storage import paths


def fence(page: str, name: str) -> str:
    """The code under "```NAME" on `page`, a path in the project; there is one such."""
    text = (paths.project_dir() / page).read_text("utf-8")
    (code,) = re.findall(rf"^```{name}\n(.*?)^```", text, re.M | re.S)
    return str(code)
