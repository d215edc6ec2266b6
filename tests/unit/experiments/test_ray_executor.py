"""A grid on a Ray cluster of two workers, one of which is killed."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny_folder import write_model, write_text

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.experiments import grid

ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of two workers on this machine, which ends with the tests."""
    folder = tempfile.mkdtemp(prefix="ray")  # a short name: sockets are in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder
        )
        yield
        ray.shutdown()
    shutil.rmtree(folder)


def killed_once(marker: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn`, by a worker that dies where it is the first of all."""
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return fn(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def refuse() -> None:
    """Fail as a task does."""
    raise SpecError("this task cannot be had")


@pytest.mark.usefixtures("cluster")
def test_the_task_of_a_killed_worker_runs_again(tmp_path: Path) -> None:
    """Ray gives it to another worker; the rows are those of one process."""
    from heapr_lab.experiments.ray_executor import RayExecutor

    class Killing(RayExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            marker = str(tmp_path / "killed")
            return super().submit(killed_once, marker, fn, *args, **kwargs)

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    tasks = grid.Grid(
        tmp_path / "rows",
        models=[str(write_model(tmp_path / "moe"))],
        methods=["paper"],
        ratios=[0.25, 0.5],
        corpora=[str(write_text(tmp_path / "text.txt"))],
        seeds=[0, 1],
        profile="small",
        seq_len=32,
    )
    frame = grid.run(tasks, executor=Killing())
    assert (tmp_path / "killed").exists()
    assert len(frame) == 4
    alone = grid.run(replace(tasks, folder=tmp_path / "again"))
    columns = ["ratio", "seed", "perplexity", "dense_perplexity", "achieved_ratio"]
    pd.testing.assert_frame_equal(frame[columns], alone[columns])
    with pytest.raises(HeaprLabError, match="this task cannot be had"):
        RayExecutor().submit(refuse).result()
