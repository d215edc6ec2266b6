"""What the READMEs say is what the tests prove and the scripts measured."""

import functools
import importlib
import re
from itertools import groupby

import pandas as pd
import pytest
from families import FAMILIES, WRAPPERS
from fences import UPDATE, blocks, updated
from house import WINGS

from benchmarks import advice, questions, readme
from benchmarks.index import measured
from heapr_lab.errors import SpecError
from heapr_lab.experiments import paper
from heapr_lab.storage import paths

README = paths.project_dir() / "README.md"
INSIDE = paths.project_dir() / "heapr_lab" / "README.md"
ADVICE = paths.project_dir() / "docs" / "when_not.md"
COMPARING = ADVICE.with_name("comparing.md")
CLAIMS = ADVICE.with_name("claims.md")
ANSWERS = paths.figures_dir() / "README.md"
RESULTS = paths.project_dir() / "benchmarks" / "README.md"
MOST_LINES = 110
MOST_ROWS = 12
MOST_WORDS = 2500
NOT_ASKED = {"13_damage"}
"""Figures that answer no question of the page."""


@functools.cache
def committed() -> tuple[pd.DataFrame, pd.DataFrame, dict[str, pd.DataFrame]]:
    """Summary, claims and benchmarks, as committed."""
    summary, claims = (
        pd.read_csv(paths.figures_dir() / f"0_{name}_table.csv")
        for name in ("summary", "claims")
    )
    return summary, claims, measured()


# --- blocks -----------------------------------------------------------------------


def test_the_supported_families_are_those_proven():
    """Their number is that of test_families."""
    proven = f"{len(FAMILIES)} text families and {len(WRAPPERS)} multimodal wrappers"
    assert updated(README, {"families": proven})["families"] == proven


def _job_of(wing: str) -> str:
    """The first line of the docstring of a wing, beginning in lower case."""
    line = importlib.import_module(f"heapr_lab.{wing}").__doc__.split("\n")[0]
    return line[:1].lower() + line[1:]


def test_the_wings_are_those_of_the_package():
    """Each wing in its order, with the first line of its docstring."""
    lines = [f"* `{name}/`: {_job_of(name)}\n" for name in WINGS]
    listed = "\n" + "".join(lines)
    assert updated(INSIDE, {"wings": listed})["wings"] == listed
    assert "\n* `storage/`: files on disk" in listed


def test_the_numbers_in_front_are_the_committed_ones():
    """Summary, claims and benchmarks in README.md are made of the committed files."""
    made = readme.front_blocks(readme.claims_table(*committed()[1:]), committed()[2])
    shown = updated(README, made)
    assert {k: v for k, v in shown.items() if k != "families"} == made


def test_every_table_of_the_results_is_generated():
    """Each block of benchmarks/README.md is what the committed results give today."""
    made = readme.sections(committed()[2])
    if UPDATE:
        readme.fill_sections(RESULTS, made)
    assert blocks(RESULTS) == {name: section.block for name, section in made.items()}
    text = RESULTS.read_text("utf-8")
    for name, section in made.items():
        heading, _, _ = text.partition(f"<!-- {name} -->")
        assert re.findall(r"^## (.*)$", heading, re.M)[-1] == section.title


def test_every_question_is_answered_by_the_committed_numbers():
    """A picture, an answer, what was measured and how, below each heading."""
    assert paper.CALIBRATION_RATIO == questions._TEXT_RATIO
    made = questions.blocks(questions.Committed(*committed()))
    assert updated(ANSWERS, made) == made
    text = ANSWERS.read_text("utf-8")
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == [question.text for question in questions.QUESTIONS]
    assert len(text.split()) < MOST_WORDS


def test_no_figure_is_left_out():
    """The pictures of the folder are those of the questions."""
    drawn = {path.stem for path in paths.figures_dir().glob("*.png")}
    assert drawn - NOT_ASKED == {question.stem for question in questions.QUESTIONS}


def test_the_advice_is_made_of_the_committed_results():
    """Every table of docs/when_not.md."""
    made = {name: readme.as_block(table) for name, table in advice.tables().items()}
    made |= advice.sentences()
    assert updated(ADVICE, made) == made
    table = {"main_table": readme.folded(readme.main_table())}
    assert updated(COMPARING, table)["main_table"] == table["main_table"]


def test_the_claims_are_those_of_the_committed_results():
    """Every number of them, in docs/claims.md."""
    made = readme.claims_blocks(readme.claims_table(*committed()[1:]), committed()[2])
    assert updated(CLAIMS, made) == made


def test_only_named_blocks_are_filled_and_a_new_benchmark_gets_a_section(tmp_path):
    """What the file lacks is added at its end, under its title, once.

    Text around a block stays; to fill one that is not there is an error.
    """
    path = tmp_path / "results.md"
    old = "## Old\n\n<!-- old -->{}<!-- end --> a <!-- b -->kept<!-- end -->\n"
    path.write_text(old.format(1))
    sections = {"old": readme.Section("Old", "2"), "new": readme.Section("New", "3")}
    for _ in range(2):
        readme.fill_sections(path, sections)
        assert path.read_text() == (
            old.format(2) + "\n## New\n\n<!-- new -->3<!-- end -->\n"
        )
    with pytest.raises(SpecError, match="no block '<!-- z -->"):
        readme.fill_blocks(path, {"z": ""})


# --- the whole page ---------------------------------------------------------------


def test_the_readme_is_read_in_a_minute():
    """Few lines, and no table longer than the paper's twelve claims."""
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    parts = groupby(lines, key=lambda line: line.startswith("|"))
    sizes = [len(list(rows)) - 2 for is_table, rows in parts if is_table]
    assert len(sizes) >= 3
    assert max(sizes) <= MOST_ROWS


@pytest.mark.parametrize(
    "path", [README, ANSWERS, RESULTS], ids=["README", "figures", "benchmarks"]
)
def test_every_link_leads_somewhere(path):
    """Relative links are files or folders; no picture is missing or empty."""
    links = re.findall(r"\]\(([^)#]+)", path.read_text("utf-8"))
    relative = [link for link in links if "://" not in link]
    assert len(relative) >= 10
    assert [link for link in relative if not (path.parent / link).exists()] == []
    pictures = [link for link in relative if link.endswith(".png")]
    sizes = [(path.parent / link).stat().st_size for link in pictures]
    assert min(sizes) > 10_000


def test_a_long_table_is_folded():
    """Eleven rows open with a click; ten are in sight."""
    rows = pd.DataFrame({"a": range(11)})
    assert "<details><summary>11 rows</summary>" in readme.folded(rows)
    assert "<details>" not in readme.folded(rows.head(10))
