"""Steps of a run in several processes, which meet in the cache."""

import functools
import os
import signal
from pathlib import Path

import pytest
from tiny_folder import write_model

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.experiments import workers
from heapr_lab.workbench.workbench import Workbench, open_workbench


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_model(tmp_path_factory.mktemp("workers") / "moe")


def note(bench: Workbench, *, folder: Path, name: str) -> None:
    """Write down which process did this, and with which model."""
    (folder / name).write_text(f"{os.getpid()} {bench.identity['weights']}")


def refuse(_bench: Workbench) -> None:
    """Fail as a step does."""
    raise SpecError("this step cannot be had")


def end(_bench: Workbench) -> None:
    """Be ended from outside, as for lack of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("n", [1, 2])
def test_every_step_is_done_once_on_the_same_model(
    n: int, folder: Path, tmp_path: Path
) -> None:
    """In this process or in others, with progress."""
    opened = functools.partial(open_workbench, str(folder), profile="small")
    bench = opened()
    names = ["a", "b", "c", "d"]
    steps = [functools.partial(note, folder=tmp_path, name=name) for name in names]
    seen: list[tuple[int, int]] = []
    with workers.workers(n, opened) as executor:
        workers.run_steps(
            steps, bench, executor, progress=lambda *step: seen.append(step)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    pids, weights = zip(
        *((tmp_path / name).read_text().split() for name in names), strict=True
    )
    assert set(weights) == {bench.identity["weights"]}
    assert (str(os.getpid()) in pids) == (n == 1)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("step", "message"),
    [(refuse, "this step cannot be had"), (end, "run again with --workers 1")],
)
def test_a_step_that_fails_ends_the_run(
    folder: Path, step: workers.Step, message: str
) -> None:
    """With its own error, or one that says what to do."""
    opened = functools.partial(open_workbench, str(folder), profile="small")
    with (
        pytest.raises(HeaprLabError, match=message),
        workers.workers(2, opened) as executor,
    ):
        workers.run_steps(
            [step], opened(), executor, progress=lambda _done, _total: None
        )


def test_a_small_model_takes_every_core(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one gets all of them for itself."""
    bench = open_workbench(str(folder), profile="small")
    monkeypatch.setattr(workers, "cores", lambda: 3)
    assert workers.default_workers(bench) == 3
    monkeypatch.setattr(workers, "_SMALL", 10)
    assert workers.default_workers(bench) == 1
