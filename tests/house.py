"""The plan of the house: its wings from the bottom up, and what files import."""

import ast
import io
import tokenize
from pathlib import Path

import heapr_lab

PACKAGE = Path(heapr_lab.__file__).parent
TOP = ("errors", "hub", "progress", "registry", "repr_html")
"""Modules shared by all wings, below them; `__init__` and `__main__` stand above."""
CORE = (
    "storage",
    "text",
    "models",
    "importance",
    "pruning",
    "evaluation",
    "workbench",
)
"""The wings that import nothing of those around them."""
WINGS = (
    *CORE,
    "streaming",
    "pretrained",
    "refinement",
    "inspection",
    "tasks",
    "checkpoints",
    "serving",
    "methods",
    "recipes",
    "figures",
    "experiments",
    "panel",
    "cli",
)
"""All wings from the bottom up: each imports itself and what stands before it."""


def imported_modules(path: Path) -> set[str]:
    """The dotted names below heapr_lab that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    prefix = "heapr_lab."
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def code_lines(path: Path) -> int:
    """Lines of code: without blank lines, comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    skipped = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - skipped)
