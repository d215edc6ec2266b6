"""The plan of the house: imports point downward, and tables need no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import heapr_lab

PACKAGE = Path(heapr_lab.__file__).parent
LAYERS = (
    {"specs", "hub"},
    {
        "artefacts",
        "summaries",
        "progress",
        "tokens",
        "ragged",
        "tensor_files",
        "weights_hash",
        "latency",
        "modes",
    },
    {"store", "rows", "estimators", "accounting", "moments"},
    {
        "experts",
        "table",
        "masks",
        "rules",
        "methods",
        "pydocs",
        "provenance",
        "folders",
        "failures",
    },
    {"dispatch", "rankings", "corpora", "models", "sources"},
    {"active", "calibration", "lab_run"},
    {"likelihood", "selection"},
    {"stepping"},
    {"grams"},
    {"surgery", "continuation", "harness_model", "uniform", "pruned_card"},
    {"slice_plan", "gguf_file", "compensation"},
    {"elimination", "shards"},
    {"checkpoints"},
    {"importance", "evaluation", "harness", "traces"},
    {"distillation"},
    {"learned", "iterated"},
    {"recovery"},
    {"lab_model", "pipeline"},
    {"experiments", "figures", "damage", "workers"},
    {"budgets"},
    {"export", "sessions", "notebooks", "options", "reports", "lab_card"},
    {"explorer", "reproduce", "headless", "app", "preflight"},
    {"cli", "extension"},
    {"__main__"},
)
"""From the bottom up; what stands in one row does not import each other."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"
)


def unit_of(path: Path) -> str:
    """The module, or the package below heapr_lab, that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_units(path: Path) -> set[str]:
    """The modules of heapr_lab that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "heapr_lab":
            found |= {f"heapr_lab.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name.split(".")[1] for name in found if name.startswith("heapr_lab.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_point_downward(path: Path) -> None:
    """A module has a place in LAYERS and imports only what stands before it."""
    unit = unit_of(path)
    assert unit in RANK, f"give {unit} a place in LAYERS"
    others = imported_units(path) - {unit}
    assert {name for name in others if RANK[name] >= RANK[unit]} == set()


def test_no_module_is_called_utils() -> None:
    """Every module is named for its one job."""
    assert {path.stem for path in MODULES} & {"utils", "util", "helpers"} == set()


@pytest.mark.parametrize(
    "module", ["store", "estimators", "accounting", "table", "selection", "figures"]
)
def test_imports_without_torch(module: str) -> None:
    """Scores, selections and figures are made without importing torch."""
    code = f"import sys, heapr_lab.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
