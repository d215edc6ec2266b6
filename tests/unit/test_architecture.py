"""The plan of the house: imports point downward, and tables need no torch."""

import ast
from pathlib import Path

import pytest
from house import PACKAGE, TOP, WINGS, imported_modules
from processes import run_each, says

RANK = dict.fromkeys(TOP, 0) | {wing: 1 + i for i, wing in enumerate(WINGS)}
RANK["errors"] = -1  # below the others


def files_of(unit: str) -> list[Path]:
    """The modules of a wing, or the one at the top."""
    return [*PACKAGE.glob(f"{unit}.py"), *PACKAGE.glob(f"{unit}/**/*.py")]


MODULES = [path for unit in (*TOP, *WINGS) for path in files_of(unit)]


def module_of(name: str) -> str:
    """The module in the dotted name of a module, or of something in one."""
    path = PACKAGE.joinpath(*name.split("."))
    there = path.is_dir() or path.with_suffix(".py").exists()
    return name if there else name.rpartition(".")[0]


def test_every_wing_has_a_row():
    """A new sub-package gets its place among WINGS."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(WINGS)


@pytest.mark.parametrize("wing", [*TOP, *WINGS])
def test_imports_point_downward(wing):
    """A wing imports only from itself and from wings below it."""
    above = [
        (path.name, name)
        for path in files_of(wing)
        for name in imported_modules(path)
        if name.split(".")[0] != wing
        and RANK.get(name.split(".")[0], len(RANK)) >= RANK[wing]
    ]
    assert above == []


@pytest.mark.parametrize("wing", WINGS)
def test_no_circles_within_a_wing(wing):
    """Also within a wing there is an order in which modules import each other."""
    files = {f"{wing}.{path.stem}": path for path in files_of(wing)}
    left = {
        name: {*map(module_of, imported_modules(path))} - {name}
        for name, path in files.items()
    }
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert left == {}


def test_few_modules_stand_at_the_top():
    """What is not shared by all belongs to a wing."""
    at_the_top = sorted(path.stem for path in PACKAGE.glob("*.py"))
    assert at_the_top == sorted(["__init__", "__main__", *TOP])


def test_no_module_is_called_utils():
    """Every module is named for its one job."""
    assert {path.stem for path in MODULES} & {"utils", "util", "helpers"} == set()


def test_variables_are_nouns():
    """None says only that something was looked up, or whose it is."""
    empty = {"found", "own"}
    assigned = {
        (path.name, node.lineno)
        for path in MODULES
        for function in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if (isinstance(node, ast.arg) and node.arg in empty)
        or (isinstance(node, ast.Name) and node.id in empty and _is_set(node))
    }
    assert assigned == set()


def _is_set(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


WITHOUT_TORCH = (
    *WINGS,
    "storage.cache",
    "importance.estimators",
    "importance.table",
    "models.architecture",
    "pruning.selection",
    "experiments.notebooks",
    "panel.inspect_tab",
)
_IMPORT_ALL = """
import importlib, sys
import heapr_lab.cli.app
assert not {"torch", "transformers", "pandas", "psutil", "tqdm"} & set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
import heapr_lab
heapr_lab.run_tasks
assert "lm_eval" not in sys.modules
"""


def test_imports_without_torch():
    """Wings by name, scores, selections, figures and READMEs need no torch.

    The command line needs no pandas either, nor what only work needs, and tasks no
    lm_eval until they are run.
    """
    modules = [f"heapr_lab.{name}" for name in WITHOUT_TORCH] + ["benchmarks.readme"]
    says("-c", _IMPORT_ALL, *modules, cwd=PACKAGE.parent)


def test_any_module_of_formats_comes_first():
    """They register with transformers while it is imported, which imports them."""
    run_each(
        "import heapr_lab.models.folders",
        "import heapr_lab.methods.composing",
    )
