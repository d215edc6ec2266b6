"""The core: closed, small, read in an hour, and enough for the lines in the README."""

import ast
import re
from pathlib import Path

import pytest
from house import CORE, PACKAGE, TOP, code_lines
from processes import run_each
from tiny_folder import write_text

ROOT = Path(__file__).parents[2]
MOST_LINES = 6_800
"""Lines of code in the core."""
MOST_TO_READ = 2_800
"""Lines of code in the files to read first."""
READING = (ROOT / "heapr_lab" / "README.md").read_text("utf-8")
LINES = re.search(
    r"```python\n(import heapr_lab.*?)```",
    (ROOT / "README.md").read_text("utf-8"),
    re.DOTALL,
)
SMALLER = {
    "n_sequences=128": "n_sequences=4",
    "n_sequences=64": "n_sequences=2",
    "seq_len=256": "seq_len=32",
}
ASKING = re.compile(r"\b(stream_of|runs_whole|require_loaded)\b|weights?\.is_meta")
"""What asks whether a model is on disk, or refuses it."""
OPENING = re.compile(r"\bopen_(streamed|stepping)\b")
"""What opens models on disk."""
ALONE = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("heapr_lab.") and name.split(".")[1] not in THERE:
            raise ModuleNotFoundError(f"{name} is refused", name=name)

sys.meta_path.insert(0, Refuse())
"""
"""Makes unimportable what is not in THERE."""


@pytest.mark.parametrize("wing", CORE)
def test_nothing_else_is_imported_by_name(wing):
    """Neither as text nor as an attribute of the package, which no statement shows."""
    for path in (PACKAGE / wing).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            named = isinstance(node, ast.Import) and "heapr_lab" in {
                alias.name for alias in node.names
            }
            text = node.value if isinstance(node, ast.Constant) else None
            place = isinstance(text, str) and re.fullmatch(r"heapr_lab(\.\w+)+", text)
            assert not named, path.name
            assert not place, (path.name, text)


def test_the_core_is_small():
    """What grows beyond this belongs to a wing around it."""
    files = [path for wing in CORE for path in (PACKAGE / wing).glob("*.py")]
    files += [PACKAGE / f"{name}.py" for name in TOP]
    assert sum(map(code_lines, files)) <= MOST_LINES


def test_models_on_disk_are_asked_for_in_few_files():
    """All others ask the backend, which is the same for models in memory."""
    asking, opening = (
        {
            path.relative_to(PACKAGE).as_posix()
            for path in PACKAGE.rglob("*/*.py")
            if pattern.search(path.read_text("utf-8"))
            and path.parent.name != "streaming"
        }
        for pattern in (ASKING, OPENING)
    )
    asking -= {"models/backend.py"}
    assert len(asking) <= 4
    assert len(opening) <= 2
    assert not {path.partition("/")[0] for path in asking | opening} & {*CORE}


def test_what_is_read_first_is_read_in_an_hour():
    """Thirteen files of the core, which are there, one sentence for each."""
    rows = re.findall(r"^\d+\. `([\w/]+\.py)`: .+\.$", READING, re.MULTILINE)
    assert len(rows) == 13
    assert {row.partition("/")[0] for row in rows} <= {*CORE}
    assert sum(code_lines(PACKAGE / row) for row in rows) <= MOST_TO_READ


def test_the_lines_of_the_readme_run_alone(tmp_path):
    """Nothing else can be imported; only writing a checkpoint needs more."""
    assert LINES is not None
    lines = LINES[1].strip()
    text = repr(str(write_text(tmp_path / "text.txt")))
    for large, small in (SMALLER | {'"pydocs"': text}).items():
        assert large in lines
        lines = lines.replace(large, small)
    measuring, saving = lines.rsplit("\n", 1)
    assert "save_pruned" in saving
    core = (*TOP, *CORE)
    wider = (*core, "checkpoints", "streaming")
    alone = f"THERE = {core!r}\n{ALONE}{measuring}\nTHERE = {wider!r}\n{saving}"
    printed = run_each(alone, cwd=tmp_path)
    assert printed.count("Perplexity(") == lines.count("print(")
    assert (tmp_path / "smaller" / "config.json").exists()
