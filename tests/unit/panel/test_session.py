"""A session selects, counts and evaluates as it is told."""

from pathlib import Path

import pytest
from random_tables import small_table

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.answer import answers
from heapr_lab.panel.session import PruningSession
from heapr_lab.progress import time_left_text
from heapr_lab.pruning.options import Selection
from heapr_lab.workbench.workbench import Workbench


def test_session_without_architecture() -> None:
    """A bare table still selects; of parameters nothing is known."""
    table = ImportanceTable.from_frame(small_table().frame)
    session = PruningSession(table)
    assert session.savings() is None
    assert "4 of 16" not in session.describe()
    assert "12 of 16 kept" in session.describe()
    assert [one.of for one in answers(session)[:2]] == ["not in the table"] * 2


def test_session_without_a_model_cannot_evaluate() -> None:
    """Evaluating a table alone is an error that says what to do."""
    with pytest.raises(SpecError, match="open_workbench"):
        PruningSession(small_table()).evaluate(("pydocs",))


def test_session_evaluates_and_collects(bench: Workbench, root: Path) -> None:
    """Points are the workbench's own numbers; the dense model is there once."""
    text = str(root / "text.txt")
    windows = bench.test_windows(text)
    session = PruningSession(bench.measure(windows), workbench=bench)
    for ratio in (0.3, 0.6, 0.3):
        session.choose(Selection(ratio=ratio))
        session.evaluate((text,))
    points = session.points.sort_values("ratio")
    assert points["ratio"].tolist() == [0.0, 0.3, 0.6]
    session.choose(Selection(ratio=0.6))
    expected = [bench.perplexity(keep, windows).nll for keep in (None, session.keep)]
    assert [points["nll"].iloc[0], points["nll"].iloc[2]] == expected
    assert points["delta_nll"].iloc[2] == expected[1] - expected[0] != 0


def test_progress_counts_up_to_the_whole(bench: Workbench, root: Path) -> None:
    """Progress runs to all windows of both models, with an estimate on the way."""
    text = str(root / "text.txt")
    session = PruningSession(bench.measure(bench.test_windows(text)), workbench=bench)
    session.choose(Selection(ratio=0.45))
    steps: list[tuple[float, float, str, str]] = []

    def note(done: float, total: float, said: str, *, left: str) -> None:
        steps.append((done, total, said, left))

    session.evaluate((text,), report=note)
    n_windows = 2 * bench.profile.n_test
    assert steps[-1][:2] == (n_windows, n_windows)
    assert [step[0] for step in steps] == sorted(step[0] for step in steps)
    assert steps[-1][2].startswith("pruned on ")
    assert steps[-1][3] == time_left_text(0)
