"""The pages that nobody writes: the command line's help, terms, notebooks, results."""

import itertools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer.main
from typer.testing import CliRunner

from heapr_lab import methods
from heapr_lab.cli.app import app
from heapr_lab.panel.glossary import GLOSSARY, Term
from heapr_lab.storage import paths

PROGRAM = "heapr-lab"
PAGES = {
    "../figures/README.md": "results.md",
    "../benchmarks/README.md": "benchmarks.md",
    "../notebooks/README.md": "notebooks/index.md",
}
"""What is a page here of the files that pages link to."""
_NOT_HERE = re.compile(
    r"\[([^]]+)\]\(\.\./(?:data/\w+/README|README|figures/\w+_table)\.md(?:#[\w-]+)?\)"
)
"""Links to Markdown files that are no pages: cards, the README, tables."""
_WIDTH = 88
_HEAD = """\
# Command line

What each command says with `--help`.
"""
_GLOSSARY_HEAD = """\
# Glossary

What the controls and terms of [the panel](panel.md) mean; its tooltips and its help say
the same.
"""
_TOCTREE = """
```{{toctree}}
:hidden:

{names}
```
"""


def write_pages(docs: Path) -> None:
    """Write the pages that are made, and the folder `notebooks`, in `docs`."""
    _write(docs / "commands.md", commands_page(help_texts()))
    _write(docs / "glossary.md", glossary_page())
    for name, text in measured_pages().items():
        _write(docs / name, text)
    copy_notebooks(paths.project_dir() / "notebooks", docs / "notebooks")


def command_names() -> list[str]:
    """The commands, in the order in which `--help` lists them."""
    group: Any = typer.main.get_command(app)
    return list(group.list_commands(typer.Context(group)))


def help_texts() -> dict[str, str]:
    """What `--help` says, of the program and of each command."""
    texts = {PROGRAM: _help()}
    return texts | {f"{PROGRAM} {name}": _help(name) for name in command_names()}


def _help(*command: str) -> str:
    """What `--help` says, whatever terminal this is.

    Raises:
        RuntimeError: the command line failed.
    """
    result = CliRunner().invoke(
        app,
        [*command, "--help"],
        prog_name=PROGRAM,
        terminal_width=_WIDTH,
        color=False,
    )
    if result.exit_code:
        raise RuntimeError(f"{PROGRAM} {' '.join(command)}: {result.output}")
    return result.stdout.strip()


def commands_page(helps: Mapping[str, str]) -> str:
    """The page of the command line, a section for each text."""
    first, *others = [f"```text\n{text}\n```\n" for text in helps.values()]
    names = list(helps)[1:]
    sections = [
        f"## {name}\n\n{text}" for name, text in zip(names, others, strict=True)
    ]
    return "\n".join([_HEAD, first, *sections])


def glossary_page() -> str:
    """The page of the terms, a section for each heading."""
    sections = [_GLOSSARY_HEAD]
    for heading, terms in GLOSSARY.items():
        lines = "\n".join(f"* **{term.name}**: {_said(term)}" for term in terms)
        sections.append(f"## {heading}\n\n{lines}\n")
    return "\n".join(sections)


def _said(term: Term) -> str:
    """The text of a term, with where it is said at length."""
    links = [f"[{term.page.removesuffix('.md')}]({term.page})"] if term.page else []
    places = ", ".join([*links, *filter(None, [term.paper])])
    return f"{term.text} ({places})" if places else term.text


def deviations_block() -> str:
    """How our methods differ from their papers, those that share a text together."""
    ours, lines = methods.DESCRIBED, ["\n"]
    for texts, group in itertools.groupby(ours, key=lambda k: ours[k]["deviations"]):
        names = list(group)
        cited = "; ".join(dict.fromkeys(ours[name]["citation"] for name in names))
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(" ".join([f"* {listed} ({cited}).", *texts]))
        lines.append("\n")
    return "".join(lines)


def measured_pages() -> dict[str, str]:
    """The pages of what was measured, their links as seen from `docs`."""
    pages = {}
    for target in list(PAGES)[:2]:
        text = (paths.project_dir() / target.removeprefix("../")).read_text("utf-8")
        folder = target.removesuffix("README.md")
        page = re.sub(r"\]\((?!\.\.|https?:|#)", f"]({folder}", text)
        pages[PAGES[target]] = page.replace("](../docs/", "](")
    return pages


def linked_pages(text: str) -> str:
    """A page as the site has it: links to its own pages, none to what it lacks."""
    for target, page in PAGES.items():
        text = re.sub(rf"\]\({re.escape(target)}(#[\w-]+)?\)", rf"]({page}\1)", text)
    text = re.sub(r"\]\(\.\./notebooks/(\w+\.ipynb)\)", r"](notebooks/\1)", text)
    return _NOT_HERE.sub(r"\1", text)


def copy_notebooks(source: Path, target: Path) -> None:
    """Copy the notebooks beside the pages, with their list as the index."""
    target.mkdir(exist_ok=True)
    notebooks = sorted(source.glob("*.ipynb"))
    for stale in set(target.iterdir()) - {target / path.name for path in notebooks}:
        stale.unlink()
    for path in notebooks:
        shutil.copy2(path, target)
    names = "\n".join(path.stem for path in notebooks)
    text = (source / "README.md").read_text("utf-8").replace("](../docs/", "](../")
    _write(target / "index.md", text + _TOCTREE.format(names=names))


def _write(path: Path, text: str) -> None:
    """Write a text, unless it is there: what is older is not rendered again."""
    if not path.is_file() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")
