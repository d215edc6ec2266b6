"""The modules that mutation testing changes, and the tests of each."""

from pathlib import Path

MODULES = (
    *(f"heapr_lab/{wing}/*.py" for wing in ("storage", "importance", "pruning")),
    "heapr_lab/refinement/*.py",
    "heapr_lab/evaluation/perplexity.py",
    "heapr_lab/models/hooks.py",
    "heapr_lab/models/identity.py",
)
UNIT = "tests/unit"
TESTS = {
    "storage/files": (
        "storage/test_files.py",
        "storage/test_cache.py",
        "storage/test_damaged_files.py",
    ),
    "storage/hashing": ("storage/test_hashing.py",),
    "storage/cache": (
        "storage/test_waiting.py",
        "storage/test_cache.py",
        "storage/test_paths.py",
    ),
    "storage/paths": ("storage/test_paths.py", "storage/test_cache.py"),
    "storage/provenance": ("storage/test_origins.py", "storage/test_damaged_files.py"),
    "importance/columns": (
        "importance/test_rows.py",
        "importance/test_table.py",
        "importance/test_merging.py",
    ),
    "importance/merging": ("importance/test_merging.py", "importance/test_table.py"),
    "importance/table": ("importance/test_table.py", "importance/test_table_parts.py"),
    "importance/collect": (
        "importance/test_pass.py",
        "importance/test_pass_checks.py",
        "importance/test_collect.py",
    ),
    "importance/activation_grams": ("importance/test_activation_grams.py",),
    "importance/estimators": (
        "importance/test_estimators.py",
        "importance/test_table.py",
        "importance/test_table_parts.py",
    ),
    "models/hooks": (
        "models/test_hooks.py",
        "importance/test_pass.py",
        "importance/test_activation_grams.py",
    ),
    "models/identity": ("models/test_identity_parts.py", "models/test_identity.py"),
    "pruning/masks": (
        "pruning/test_masks.py",
        "pruning/test_selection.py",
        "storage/test_damaged_files.py",
    ),
    "pruning/pareto": ("pruning/test_pareto.py",),
    "pruning/ranking": (
        "pruning/test_ranking.py",
        "pruning/test_selection.py",
        "pruning/test_selection_budgets.py",
        "../property",
    ),
    "pruning/savings": ("pruning/test_savings.py",),
    "pruning/surgery": ("pruning/test_surgery.py",),
    "pruning": ("pruning", "../property"),
    "refinement/compensation": (
        "refinement/test_compensation.py",
        "../oracle/test_compensation.py",
    ),
    "refinement/distillation": (
        "refinement/test_distillation.py",
        "refinement/test_learned_masks.py",
    ),
    "refinement/elimination": (
        "refinement/test_elimination.py",
        "../oracle/test_elimination.py",
    ),
    "refinement/iterative": ("refinement/test_iterative.py",),
    "refinement/learned_masks": (
        "refinement/test_learned_steps.py",
        "refinement/test_learned_masks.py",
    ),
    "refinement/recovery": ("refinement/test_recovery.py",),
    "evaluation/perplexity": (
        "evaluation/test_perplexity.py",
        "../oracle/test_perplexity.py",
    ),
}
"""The tests of a module or a wing, below UNIT, where they are not UNIT/<wing>."""


def tests_of(path: Path) -> list[str]:
    """The files and folders of tests of a module, from the root of the project."""
    wing = path.parent.name
    own = TESTS.get(f"{wing}/{path.stem}") or TESTS.get(wing, (wing,))
    return [f"{UNIT}/{name}" for name in own]
