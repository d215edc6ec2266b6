"""The seven zero-shot tasks of the paper, and their items on this machine.

Without torch.
"""

import os
from pathlib import Path

PAPER_TASKS = {
    "openbookqa": ("test", 500),
    "arc_easy": ("test", 2376),
    "winogrande": ("validation", 1267),
    "hellaswag": ("validation", 10042),
    "arc_challenge": ("test", 1172),
    "piqa": ("validation", 1838),
    "mathqa": ("test", 2985),
}
"""Names in the order of the paper's main table, with the split that the harness
evaluates and its number of items."""


def available_tasks() -> list[str]:
    """The ones of the seven tasks whose items are in `$HEAPR_TASKS_DIR`."""
    return [name for name in PAPER_TASKS if local_items(name)]


def local_items(name: str) -> Path | None:
    """The parquet file of a task: the whole split if available, else a part of it."""
    folder = os.environ.get("HEAPR_TASKS_DIR")
    if not folder or name not in PAPER_TASKS:
        return None
    split, _ = PAPER_TASKS[name]
    whole = Path(folder) / name / f"{split}.parquet"
    if whole.is_file():
        return whole
    # A numbered part, as validation_1000; other variants differ from the official set.
    parts = sorted(whole.parent.glob(f"{split}_[0-9]*.parquet"))
    return parts[0].resolve() if parts else None
