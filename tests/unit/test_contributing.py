"""CONTRIBUTING.md is true: its example works, and what it names is there."""

import re
import shutil
from pathlib import Path

import pytest
from fences import fence
from processes import says

import heapr_lab
from heapr_lab.storage import paths

ROOT = paths.project_dir()
PAGE = "CONTRIBUTING.md"
TEXT = (ROOT / PAGE).read_text("utf-8")
TABLE = ROOT / "tests" / "data" / "earlier" / "importance.parquet"
MOST_LINES = 85
CHECK = """
import numpy as np

column = lambda name: table.column(name).astype(np.float64)
energy = column("sum_h2") / column("tokens").clip(min=1) * column("w_down_sq")
n_removed = len(energy) // 4
first = np.argsort(energy, kind="stable")[:n_removed]
assert keep.n_removed == n_removed > 0
assert not keep.rows[first].any()
assert keep != select(table, ratio=0.25)
"""
"""The slow twin: the atoms that went are those of the least energy, not HEAPr's."""


@pytest.fixture
def edited(tmp_path) -> Path:
    """A copy of the package, with the formula and the row where the text puts them."""
    package = Path(heapr_lab.__file__).parent
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "heapr_lab", ignore=skipped)
    path = tmp_path / "heapr_lab" / "importance" / "estimators.py"
    formulas, registry, rows = path.read_text("utf-8").partition("\nESTIMATORS: ")
    head, first, rest = rows.partition("Estimator(\n")
    row = fence(PAGE, "python row").strip() + ",\n"
    text = [formulas, fence(PAGE, "python formula"), registry, head, row, first, rest]
    path.write_text("".join(text), "utf-8")
    shutil.copyfile(TABLE, tmp_path / "importance.parquet")
    return tmp_path


def test_a_new_estimator_is_a_formula_and_a_row(edited):
    """The package so edited selects by it and draws what it selected."""
    code = fence(PAGE, "python use") + CHECK
    env = {"PYTHONPATH": str(edited), "MPLBACKEND": "Agg", "HOME": str(edited)}
    assert says("-c", code, cwd=edited, env=env).startswith("KeepMask(")
    assert (edited / "energy.png").stat().st_size > 5_000


def test_every_file_it_names_is_there():
    """Paths between backticks exist, and say what the text says they hold."""
    named = set(re.findall(r"`((?:heapr_lab|tests|benchmarks)/[\w./]+)`", TEXT))
    names = {path for path in named if "NAME" not in path}
    assert len(names) >= 10
    assert [path for path in names if not (ROOT / path).exists()] == []
    rows = re.findall(r"`([A-Z_]+)` in `([\w/]+\.py)`", TEXT)
    assert len(rows) >= 6
    for name, path in rows:
        assert re.search(rf"^{name}\b", (ROOT / path).read_text("utf-8"), re.M), name


def test_tests_with_a_browser_have_their_folder():
    """It marks them; `make test` looks there alone, so others would never run."""
    marked = re.compile(r"^(@|pytestmark = |    )pytest\.mark\.browser\b", re.M)
    files = (ROOT / "tests").rglob("test_*.py")
    assert [file for file in files if marked.search(file.read_text("utf-8"))] == []


def test_it_is_one_page():
    """It is read before the first change."""
    assert len(TEXT.splitlines()) <= MOST_LINES
