"""The committed notebooks: how they are made up, and that they run."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from clone import Clone, copy_tracked

from heapr_lab.errors import SpecError
from heapr_lab.experiments.notebooks import (
    MARK,
    execute_all,
    normalise,
    read_notebook,
    sources_digest,
)
from heapr_lab.experiments.reproduce import reproduce
from heapr_lab.storage import paths

FOLDER = paths.project_dir() / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
MOST_NOTEBOOKS = 9
MOST_ROWS = 10
"""The rows of a table in sight; longer ones are folded."""
QUOTED = re.compile(r"`[^`]*`|\$\$.*?\$\$|\$.*?\$", re.DOTALL)
"""Code and mathematics, whose numbers nobody measured."""


def _sources(name: str, kind: str) -> list[str]:
    cells = read_notebook(FOLDER / name).cells
    return [cell.source for cell in cells if cell.cell_type == kind]


def _shown(name: str) -> list[dict[str, Any]]:
    """What the cells show, in order, by kind."""
    cells = read_notebook(FOLDER / name).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return [output.get("data", {}) for output in outputs]


def _is_table(data: dict[str, Any]) -> bool:
    return 'class="dataframe"' in str(data.get("text/html", ""))


def test_the_notebooks_are_there_and_listed():
    """The README of the folder has a row for each notebook, and there are few."""
    readme = (FOLDER / "README.md").read_text()
    numbers = range(MOST_NOTEBOOKS)
    assert [name[:2] for name in NAMES] == [f"{number:02d}" for number in numbers]
    assert [name for name in NAMES if f"]({name})" not in readme] == []


@pytest.mark.parametrize("name", NAMES)
class TestStructure:
    """What holds of each notebook without running it."""

    def test_opens_with_one_question(self, name):
        """Cell 1 has it, with inputs, outputs, time, and how to use it."""
        first = _sources(name, "markdown")[0]
        wanted = ("**Question.**", "| inputs |", "| outputs |", "| time |")
        assert [part for part in wanted if part not in first] == []
        assert first.count("?") == 1
        assert "Qwen/Qwen3-30B-A3B" in first

    def test_answers_first_and_last(self, name):
        """Sentences of numbers come before any picture, and end the notebook."""
        code = _sources(name, "code")[1:]
        answered = [source.endswith("\nanswer.short") for source in code].index(True)
        assert answered <= 1  # the imports may be a cell of their own
        assert code[answered + 1].endswith(";")
        assert _sources(name, "markdown")[-1].startswith("## Answer\n")
        assert code[-1] == "answer"

    def test_shows_a_picture_before_tables_which_are_short(self, name):
        """No table is in sight before the first picture or longer than ten rows."""
        shown = _shown(name)
        tables = [place for place, data in enumerate(shown) if _is_table(data)]
        pictures = [place for place, data in enumerate(shown) if "image/png" in data]
        assert pictures
        assert pictures[0] < min(tables, default=len(shown))
        for place in tables:
            text = shown[place]["text/html"]
            rows = text.partition("<tbody>")[2].count("<tr")
            assert rows <= MOST_ROWS or "<details>" in text

    def test_prints_no_table_twice(self, name):
        """Frames are written as HTML alone, and none is shown again."""
        tables = [data for data in _shown(name) if _is_table(data)]
        assert [data for data in tables if "text/plain" in data] == []
        written = [data["text/html"] for data in tables]
        assert len(set(written)) == len(written)

    def test_second_cell_holds_the_parameters(self, name):
        """Cell 2 is tagged and assigns MODEL and PROFILE, nothing else."""
        cell = read_notebook(FOLDER / name).cells[1]
        assert cell.metadata.tags == ["parameters"]
        assert cell.source == 'MODEL = "lab"\nPROFILE = "lab"'

    def test_prose_has_no_numbers(self, name):
        """Numbers are displayed by cells, so prose after cell 1 has none."""
        prose = [QUOTED.sub("", text) for text in _sources(name, "markdown")[1:]]
        assert [text for text in prose if re.search(r"\d", text)] == []

    def test_checks_what_must_hold(self, name):
        """The cell before the answer asserts what holds of every model."""
        checks = _sources(name, "code")[-2]
        assert checks.startswith("# Checks\n")
        assert checks.count("assert ") >= 3

    def test_is_committed_executed(self, name):
        """Every code cell ran, in order, from the sources that are committed."""
        notebook = read_notebook(FOLDER / name)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        counts = [cell.execution_count for cell in code]
        assert counts == list(range(1, len(code) + 1))
        assert notebook.metadata[MARK]["sources"] == sources_digest(notebook)

    def test_is_committed_normalised(self, name):
        """Outputs hold nothing that another run would change."""
        notebook = read_notebook(FOLDER / name)
        again = read_notebook(FOLDER / name)
        normalise(again)
        again.metadata[MARK] = notebook.metadata[MARK]
        assert again == notebook
        shown = [str(text) for data in _shown(name) for text in data.values()]
        assert [text for text in shown if " at 0x" in text] == []
        assert [text for text in shown if str(paths.project_dir()) in text] == []


# --- the main job as a stranger runs it: no data, no variable, a hub that refuses ---


TIMEOUT_SECONDS = 1080
"""The limit on two busy cores; some three minutes are enough on idle ones."""


def with_little_text(path: Path) -> None:
    """Let the module harvest every eighth file of two packages: all take a minute."""
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


@pytest.mark.notebook
@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_small_profile(name, stranger):
    """The notebook ran from top to bottom, its checks included, every figure shown."""
    notebook = read_notebook(stranger.figures / "notebooks" / name)
    assert 'PROFILE = "small"' in notebook.cells[1].source
    assert notebook.cells[-1].outputs[0].data["text/markdown"]
    for cell in notebook.cells:
        kinds = {kind for output in cell.get("outputs", []) for kind in output.data}
        assert ("image/png" in kinds) == cell.source.endswith(";")


_AGAIN = """
import sys
from heapr_lab.experiments.notebooks import execute_notebook
source, output, inputs = sys.argv[1:]
parameters = {"MODEL": "lab", "PROFILE": "small"}
execute_notebook(source, parameters=parameters, inputs=inputs, output=output)
"""


@pytest.mark.notebook
def test_runs_are_the_same_and_the_second_is_skipped(stranger, tmp_path):
    """Two runs of the tour give the same bytes, so that there is nothing to do."""
    once = stranger.figures / "notebooks" / NAMES[0]
    inputs = read_notebook(once).metadata[MARK]["inputs"]
    source, again = stranger.folder / "notebooks" / NAMES[0], tmp_path / NAMES[0]
    stranger.run("-c", _AGAIN, str(source), str(again), inputs)
    assert again.read_bytes() == once.read_bytes()
    parameters = {"MODEL": "lab", "PROFILE": "small"}
    options = {"inputs": inputs, "output": once.parent}
    assert execute_all(source.parent, parameters=parameters, **options) == []


def _number(stem: str) -> int:
    return int(stem.partition("_")[0])


@pytest.mark.notebook
def test_reproduce_makes_every_figure_and_table(stranger):
    """The main job on the small profile, with nothing but what is tracked."""
    drawn = {path.stem for path in stranger.figures.glob("*.png")}
    assert {_number(name) for name in drawn} == {1, 2, 3, 4, 5, 6, 8}
    assert {path.stem for path in stranger.figures.glob("*.pdf")} == drawn
    tables = {_number(path.stem) for path in stranger.figures.glob("*_table.csv")}
    assert tables == {0, 8}
    assert all(path.stat().st_size > 0 for path in stranger.figures.glob("*_table.*"))


@pytest.mark.notebook
def test_a_strangers_run_says_what_it_skipped(stranger):
    """Each corpus that is not there is named once, with what to do about it."""
    for name in ("wikitext2", "ptb", "c4"):
        assert stranger.output.count(f"skipped {name}: ") == 1
    assert "Set the variable, or connect to the hub" in stranger.output
    assert re.search(r"claims of the paper here: \d+ .*agrees.*table", stranger.output)


@pytest.mark.notebook
def test_a_strangers_run_changes_nothing_that_is_tracked(stranger):
    """The README, the figures and the notebooks stay as they were committed."""
    assert stranger.git("status", "--porcelain") == ""
    assert any(stranger.figures.iterdir())


def test_publishing_is_of_the_lab_model_alone():
    """What is committed says what it is of, so nothing else may be written there."""
    with pytest.raises(SpecError, match="expected the lab model"):
        reproduce("lab", profile="small", publish=True)
    with pytest.raises(SpecError, match="expected the lab model"):
        reproduce("smolmoe", publish=True)
