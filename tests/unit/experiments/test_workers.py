"""Steps of a run in several processes, which meet in the cache."""

import functools
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import pytest
from heard import Heard

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.experiments import workers
from heapr_lab.workbench.workbench import Workbench, open_workbench


def note(bench: Workbench, *, folder: Path, name: str, n_processes: int) -> None:
    """Write down which process did this, and with which model; once all are there."""
    (folder.parent / f"begun-{os.getpid()}").touch()
    while len([*folder.parent.glob("begun-*")]) < n_processes:
        time.sleep(0.05)
    (folder / name).write_text(f"{os.getpid()} {bench.identity['weights']}")


def refuse(_bench: Workbench) -> None:
    """Fail as a step does."""
    raise SpecError("this step cannot be had")


def end(_bench: Workbench) -> None:
    """Be ended from outside, as for lack of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def done_by(
    bench: Workbench, executor: Executor | None, folder: Path, *, n_processes: int
) -> set[str]:
    """Four steps, each done once on the same model, with progress; by which processes.

    Args:
        bench: the model, as this process has it.
        executor: does them.
        folder: where they write.
        n_processes: how many do them.
    """
    folder.mkdir()
    where = functools.partial(note, folder=folder, n_processes=n_processes)
    steps = [functools.partial(where, name=name) for name in "abcd"]
    seen = Heard()
    workers.run_steps(steps, bench, executor, progress=seen)
    assert sorted(path.name for path in folder.iterdir()) == [*"abcd"]
    pids, weights = zip(
        *((folder / name).read_text().split() for name in "abcd"), strict=True
    )
    assert set(weights) == {bench.identity["weights"]}
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    return set(pids)


def test_steps_are_done_here(source, tmp_path):
    """There is no pool."""
    opened = functools.partial(open_workbench, str(source), profile="small")
    with workers.workers(1, opened) as executor:
        by = done_by(opened(), executor, tmp_path / "a", n_processes=1)
        assert by == {str(os.getpid())}


def in_two_processes(opened: Callable[[], Workbench], folder: Path) -> None:
    """Steps that are done, one that fails with its own error, and some that end."""
    bench = opened()
    with workers.workers(2, opened) as executor:
        by = done_by(bench, executor, folder, n_processes=2)
        assert len(by) == 2
        assert str(os.getpid()) not in by
        with pytest.raises(SpecError, match="this step cannot be had"):
            workers.run_steps([refuse], bench, executor, progress=print)
        workers.run_steps([end], bench, executor, progress=print)


def test_steps_are_done_in_two_processes(source, tmp_path):
    """If one of these is gone, the error says what to do."""
    opened = functools.partial(open_workbench, str(source), profile="small")
    with pytest.raises(HeaprLabError, match="run again with --workers 1"):
        in_two_processes(opened, tmp_path / "a")


def test_a_small_model_takes_every_core(source, monkeypatch):
    """A large one gets all of them for itself."""
    bench = open_workbench(str(source), profile="small")
    monkeypatch.setattr(workers, "cores", lambda: 3)
    assert workers.default_workers(bench) == 3
    monkeypatch.setattr(workers, "_SMALL", 10)
    assert workers.default_workers(bench) == 1
