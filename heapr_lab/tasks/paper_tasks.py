"""The seven zero-shot tasks of the paper, their items here, and what others there are.

Without torch, and without the harness, which is slow to import.
"""

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from heapr_lab.errors import SpecError
from heapr_lab.text.calibration_spec import DEFAULT_CORPUS
from heapr_lab.workbench.settings import CONTINUATION

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
CHOICES = {
    "openbookqa": 4,
    "arc_easy": 4,
    "winogrande": 2,
    "hellaswag": 4,
    "arc_challenge": 4,
    "piqa": 2,
    "mathqa": 5,
    "continuation": 4,
}
"""How many answers an item has, but for a few of ARC that have three or five."""
GUESSING = sum(1 / CHOICES[task] for task in PAPER_TASKS) / len(PAPER_TASKS)
"""The mean accuracy of guessing on the seven."""


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


def continued(tasks: Iterable[str]) -> tuple[list[str], list[str]]:
    """The corpora whose text is continued in tasks, and the tasks of the harness.

    Example:
        >>> continued(["piqa", "continuation", "continuation:ptb"])
        (['pydocs', 'ptb'], ['piqa'])
    """
    corpora, others = [], []
    for task in tasks:
        name, _, corpus = task.partition(":")
        if name == CONTINUATION:
            corpora.append(corpus or DEFAULT_CORPUS)
        else:
            others.append(task)
    return corpora, others


def check_defined(names: Iterable[str]) -> None:
    """Check that the text of the harness's definitions has these names.

    That takes half a second; importing the harness and reading the definitions, which
    `tasks.harness.check_tasks` does for certainty, takes several.

    Raises:
        SpecError: it does not have one, so that there is no such task.
    """
    others = [name for name in names if name not in PAPER_TASKS]
    if others:
        text = _definitions()
        refuse_unknown([name for name in others if name.encode() not in text])


def _definitions() -> bytes:
    """The text of all definitions; those that others include have no suffix."""
    package = find_spec("lm_eval")
    assert package is not None
    assert package.origin is not None
    files = (
        Path(folder, name)
        for folder, _, names in os.walk(Path(package.origin).parent / "tasks")
        for name in names
        if name.endswith(".yaml") or "." not in name
    )
    return b"\n".join(path.read_bytes() for path in files)


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse tasks that the harness does not know.

    Raises:
        SpecError: there are any.
    """
    unknown = ", ".join(sorted(set(names)))
    if unknown:
        raise SpecError(
            f"the harness knows no task {unknown}; the paper's are "
            f"{', '.join(PAPER_TASKS)}, `lm_eval --tasks list` lists all"
        )
