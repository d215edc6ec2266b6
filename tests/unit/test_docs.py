"""The site says what is there, and every command and cell of its tutorial runs."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pandas as pd
import pytest
import run_tutorial
import typer.main
from fences import blocks, fence, updated
from IPython.core.interactiveshell import InteractiveShell
from ipywidgets import Widget
from tiny_folder import write_model
from typer.testing import CliRunner

import heapr_lab
from benchmarks import advice
from benchmarks.quality import PASSES
from benchmarks.readme import as_block
from heapr_lab import methods
from heapr_lab.cli.app import app
from heapr_lab.panel.glossary import label_of
from heapr_lab.refinement.descent import FEWEST_TOKENS, MOST_TOKENS
from heapr_lab.storage import paths
from heapr_lab.text import corpora, pydocs
from heapr_lab.workbench import settings

ROOT = paths.project_dir()
DOCS = ROOT / "docs"
TUTORIAL = run_tutorial.TUTORIAL.read_text("utf-8")


# --- the tutorial -----------------------------------------------------------------


@pytest.fixture
def tiny_lab(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder to work in, where `lab` is a tiny model with little text."""
    model = write_model(tmp_path / "lab_moe")
    monkeypatch.setattr(paths, "lab_model_dir", lambda: model)
    little = settings.Profile("lab", 8, 32, 4, 8)
    monkeypatch.setitem(settings.PROFILES, "lab", little)
    monkeypatch.setattr(pydocs, "PYDOCS_PACKAGES", ("jinja2",))
    monkeypatch.setenv("HEAPR_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("HEAPR_TASKS_DIR", str(tmp_path))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    forget()
    yield folder
    forget()


def forget() -> None:
    """Let corpora be read anew."""
    pydocs.harvested.cache_clear()
    corpora._named_corpus.cache_clear()


def in_process(line: str) -> str:
    """What a command of the tutorial prints; make only says what it would do."""
    if line.startswith("heapr-lab "):
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)
        return str(result.stdout)
    if line.startswith("make ") and shutil.which("make"):
        command = ["make", "-n", "-C", str(ROOT), *line.split()[1:]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return ""
    assert line.startswith("make ") or line == run_tutorial.ENTER
    return ""


def test_the_tutorial_runs(tiny_lab, capsys):
    """Every command and every cell, in order; it ends with the models it promises."""
    steps = list(run_tutorial.steps(TUTORIAL))
    assert [step.language for step in steps].count("console") >= 9
    done = list(run_tutorial.run(steps, in_process, InteractiveShell()))
    assert [entry.step for entry in done] == steps
    panel = next(entry.output for entry in done if entry.step.language == "ipython")
    _, _, explore = TUTORIAL.partition("\n## Explore\n")
    named = set(re.findall(r"\*\*(.+?)\*\*", explore.partition("\n## ")[0]))
    assert {"ratio", "Evaluate", "Pin", "Export"} <= named <= names_of(panel)
    assert "Return the sum of" in capsys.readouterr().out
    best, paper = (
        json.loads((tiny_lab / name / "heapr_manifest.json").read_text())
        for name in ("pruned", "as_published")
    )
    assert len(best["held_out"]) == 3
    assert best["calibrated_on"]["own_text"] == 0.25
    assert "held_out" not in paper
    assert paper["weights"] == "sliced, otherwise unchanged"
    assert paper["calibrated_on"]["own_text"] == 0.0
    measured = run_tutorial.perplexities(done)
    assert measured["perplexity on pydocs"].nunique() == 3  # dense, best, paper


def test_its_perplexities_are_those_of_the_figures():
    """The dense lab model, and HEAPr at 40 %, on the same windows."""
    table = blocks(run_tutorial.TUTORIAL)["perplexity"]
    told = dict(re.findall(r"`heapr-lab evaluate (\w+)[^`]*` \| ([\d.]+)", table))
    rows = pd.read_csv(paths.figures_dir() / "data" / "4_boundary.csv")
    rows = rows[rows["dataset"].eq("pydocs") & rows["metric"].eq("perplexity")]
    ours = rows[rows["source"].eq("ours")]
    losses = ours.set_index(ours["ratio"].round(3))["value"]
    assert told["lab"] == f"{losses[0.0]:.2f}"
    assert told["as_published"] == f"{losses[0.4]:.2f}"


def names_of(widget: Widget) -> set[str]:
    """What stands on a widget and on those in it."""
    names = {*getattr(widget, "titles", ()), label_of(widget)}
    return names.union(*map(names_of, getattr(widget, "children", ())))


def test_every_block_of_the_tutorial_is_run():
    """No fence is of a language that `steps` leaves out, and no line is without $."""
    fences = re.findall(r"^```(\w+)$", TUTORIAL, re.MULTILINE)
    assert set(fences) == {"console", "ipython", "python"}
    consoles = re.findall(r"^```console\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
    lines = [line for block in consoles for line in block.splitlines()]
    assert [line for line in lines if not line.startswith("$ ")] == []


def test_every_command_for_the_large_model_can_be_read(tmp_path, monkeypatch):
    """The command line's own parser takes them, with the files they are about."""
    monkeypatch.setattr("heapr_lab.cli.options.check_there", lambda _: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "importance.parquet").touch()
    (tmp_path / "pruned").mkdir()
    group: Any = typer.main.get_command(app)
    context = group.make_context("heapr-lab", ["score"], resilient_parsing=True)
    lines = re.findall(r"`heapr-lab ([^`]*)`", TUTORIAL)
    assert sum("Qwen/Qwen3-30B-A3B" in line for line in lines) >= 5
    for line in lines:
        name, command, rest = group.resolve_command(context, shlex.split(line))
        command.make_context(name, rest, parent=context)


# --- the other pages --------------------------------------------------------------


def test_what_is_generated_inside_pages():
    """Deviations are those of the registry; passes those that the benchmark counts.

    Sizes of the large model are what its configuration gives today.
    """
    expected = {
        "tutorial.md": {"sizes": as_block(run_tutorial.sizes())},
        "comparing.md": {"deviations": pages.deviations_block()},
        "method.md": {
            "passes": str(PASSES["compress"]),
            "fewest_stepped": f"{FEWEST_TOKENS:,}",
            "most_stepped": f"{MOST_TOKENS:,}",
            "scores": str(PASSES["statistics"]),
            "uses": as_block(advice.uses_table()),
        },
    }
    for name, made in expected.items():
        shown = updated(DOCS / name, made)
        assert {block: shown[block] for block in made} == made
    deviations = expected["comparing.md"]["deviations"]
    assert all(f"`{name}`" in deviations for name in methods.names())


def test_every_public_name_is_in_the_reference_once():
    """The page names all of `heapr_lab.__all__`, and nothing else."""
    text = (DOCS / "api.rst").read_text("utf-8")
    named = re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", text, re.M)
    assert sorted(named) == heapr_lab.__all__


def test_the_page_of_commands_has_every_help():
    """Each command has a section with its own words, as wide on any terminal."""
    text = pages.commands_page(pages.help_texts())
    names = re.findall(r"^## heapr-lab (\S+)$", text, re.MULTILINE)
    assert names == pages.command_names()
    assert "score" in names
    for name in names:
        assert f"Usage: heapr-lab {name} " in text
    assert max(map(len, text.splitlines())) <= 100


def test_every_notebook_is_a_page(tmp_path):
    """All are copied and named in the index; what is gone goes from the copies."""
    stale = tmp_path / "notebooks" / "99_gone.ipynb"
    stale.parent.mkdir()
    stale.touch()
    pages.copy_notebooks(ROOT / "notebooks", stale.parent)
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert names == sorted(path.stem for path in stale.parent.glob("*.ipynb"))
    index = (stale.parent / "index.md").read_text("utf-8")
    _, _, listed = index.partition("```{toctree}\n:hidden:\n\n")
    assert listed.split() == [*names, "```"]


def test_every_page_is_in_the_menu():
    """The start page names the pages that are there and those that are made."""
    _, _, listed = (DOCS / "index.md").read_text("utf-8").partition(":hidden:\n")
    written = {path.stem for path in DOCS.iterdir() if path.suffix in {".md", ".rst"}}
    generated = {"commands", "glossary", "results", "benchmarks", "notebooks/index"}
    expected = written - {"index"} | generated
    assert set(listed.split()) - {"```"} == expected


def test_the_pages_link_to_what_is_there():
    """On GitHub and on the site: each relative link of each page is a file.

    So are its headings, as GitHub names them: lower case, no punctuation, hyphens for
    blanks.
    """
    read = {path.name: path.read_text("utf-8") for path in DOCS.glob("*.md")}
    read |= pages.measured_pages() | {"glossary.md": pages.glossary_page()}
    generated = {"commands.md", "notebooks/index.md", *read}
    for text in read.values():
        for link in re.findall(r"\]\((?!https:)([\w./]+)", text):
            assert link in generated or (DOCS / link).exists(), link
        linked = pages.linked_pages(text)
        for page, anchor in re.findall(r"\]\((\w+\.md)#([\w-]+)\)", linked):
            headings = re.findall(r"^#+ (.*)$", read[page], re.M)
            names = [re.sub(r"[^\w\- ]", "", line.lower()) for line in headings]
            assert anchor in {name.replace(" ", "-") for name in names}, anchor


def test_links_to_what_is_no_page_are_text():
    """Cards, tables and the README; notebooks and measurements are pages."""
    text = (
        "[a](../README.md#x) [b](../figures/9_cost_table.md) [c](../data/x/README.md)"
    )
    assert pages.linked_pages(text) == "a b c"
    text = "[a](../notebooks/00_tour.ipynb) [b](../benchmarks/README.md#x)"
    assert (
        pages.linked_pages(text) == "[a](notebooks/00_tour.ipynb) [b](benchmarks.md#x)"
    )


def test_the_many_runs_of_the_docs(tiny_lab):
    """Each writes its row once, and one that has a row ends at once."""
    names: dict[str, Any] = {"__name__": "runs"}
    exec(fence("docs/clusters.md", "python"), names)
    for number in (1, 3, 1):
        names["run"](number)
    files = {path.name for path in Path("rows").iterdir()}
    assert files == {"1.json", "3.json"}
    model, estimator, ratio, value = json.loads(Path("rows", "3.json").read_text())
    assert (model, estimator, ratio) == ("lab", "fisher", 0.4)
    assert value > 1
    Path("rows", "3.json").write_text("kept")
    names["run"](3)
    assert Path("rows", "3.json").read_text() == "kept"


# --- the site ---------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_is_made_without_a_warning(tmp_path):
    """Every page is there, with its names; none fetches anything from elsewhere."""
    pytest.importorskip("sphinx", reason="needs pip install -e '.[docs]'")
    build = [sys.executable, "-m", "sphinx", "-W", "-q", "-d", str(tmp_path / "state")]
    site = tmp_path / "html"
    process = subprocess.run(
        [*build, str(DOCS), str(site)], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    names = {path.stem for path in site.glob("*.html")}
    assert {"index", "tutorial", "commands", "api", "genindex", "search"} <= names
    tags, place = "link|script|img|iframe|source|video", r"[\"']?(https?:)?//"
    fetched = {
        ".html": rf"<({tags})\b[^>]*\b(src|href)={place}",
        ".css": rf"@import|url\({place}",
    }
    for suffix, pattern in fetched.items():
        for path in site.rglob(f"*{suffix}"):
            assert re.search(pattern, path.read_text("utf-8")) is None, path.name


def test_every_variable_of_the_environment_is_described():
    """All that the package reads are in one table, and no other of ours is."""
    sources = (path.read_text() for path in (ROOT / "heapr_lab").rglob("*.py"))
    read = {n for text in sources for n in re.findall(r'"(HEAPR_[A-Z0-9_]+)"', text)}
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    described = {*re.findall(r"^\| `(HEAPR_\w+)`", page, re.MULTILINE)}
    assert described == read - {"HEAPR_HUB_UNREACHABLE"}  # set for our own processes
