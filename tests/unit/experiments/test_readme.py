"""What the README says is what the tests prove and the scripts measured."""

import os
import re
from pathlib import Path

import pytest
from families import FAMILIES

from heapr_lab.errors import SpecError
from heapr_lab.experiments.readme import fill_blocks
from heapr_lab.storage import paths

README = paths.project_dir() / "README.md"


def block(name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- end -->`."""
    found = re.search(rf"<!-- {name} -->(.*?)<!-- end -->", README.read_text(), re.S)
    assert found is not None, name
    return found[1].strip()


def without_mark(path: Path) -> str:
    """A written table without its provenance comment."""
    return re.sub(r"<!--.*?-->", "", path.read_text()).strip()


def test_the_supported_families_are_those_proven() -> None:
    """The list is that of test_families; HEAPR_UPDATE_README=1 writes it."""
    listed = ", ".join(f"`{name}`" for name in sorted(FAMILIES))
    if os.environ.get("HEAPR_UPDATE_README") == "1":
        counted = {"n_families": str(len(FAMILIES)), "families": f"\n{listed}\n"}
        fill_blocks(README, counted)
    assert block("families") == listed
    assert block("n_families") == str(len(FAMILIES))


def test_the_summary_is_the_committed_table() -> None:
    """The numbers people read first are those that `make reproduce` wrote."""
    assert block("summary") == without_mark(paths.figures_dir() / "0_summary_table.md")


def test_every_picture_of_the_readme_is_there() -> None:
    """No picture is missing or empty."""
    pictures = re.findall(r"\]\((figures/\S+\.png)\)", README.read_text())
    assert len(pictures) >= 4
    for picture in pictures:
        assert (paths.project_dir() / picture).stat().st_size > 10_000


def test_only_the_named_block_is_filled(tmp_path: Path) -> None:
    """Text around a block stays; a block that is not there is an error."""
    path = tmp_path / "text.md"
    path.write_text("a <!-- x -->old<!-- end --> b <!-- y -->kept<!-- end --> c")
    fill_blocks(path, {"x": "new"})
    assert path.read_text() == (
        "a <!-- x -->new<!-- end --> b <!-- y -->kept<!-- end --> c"
    )
    with pytest.raises(SpecError, match="no block '<!-- z -->"):
        fill_blocks(path, {"z": ""})
