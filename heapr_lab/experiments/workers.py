"""Several processes that share one cache: the steps of a run, side by side.

A small model leaves the cores of a machine idle: its products are too narrow to be
shared out. Steps that meet in the cache alone can run in a process each instead.
"""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from heapr_lab.errors import HeaprLabError
from heapr_lab.progress import Progress
from heapr_lab.workbench.workbench import Workbench

Step = Callable[[Workbench], Any]
"""A part of a run that fills the cache; it and what it gives can be pickled."""

_SMALL = 100_000_000
"""Parameters under which one core is enough for a model."""
_AT_MOST = 8

_of_this_process: list[Callable[[], Workbench]] = []
"""In a process of a pool: what gives its workbench."""


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers(bench: Workbench) -> int:
    """As many as there are cores for a small model on the CPU, else one."""
    weights = list(bench.model.parameters())
    small = sum(weight.numel() for weight in weights) < _SMALL
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    return min(cores(), _AT_MOST) if small and on_cpu else 1


@contextlib.contextmanager
def workers(
    n: int, open_bench: Callable[[], Workbench]
) -> Iterator[concurrent.futures.Executor | None]:
    """A pool of `n` processes, or None where one is asked for: this one.

    Each opens the workbench for itself, once it is needed. Whoever calls this from a
    script guards it with `if __name__ == "__main__"`, as for any process pool.

    Args:
        n: processes.
        open_bench: gives the workbench; it has to be picklable.

    Raises:
        HeaprLabError: a process was ended from outside.
    """
    if n == 1:
        yield None
        return
    with concurrent.futures.ProcessPoolExecutor(
        n,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(open_bench, max(1, cores() // n)),
    ) as executor:
        for _ in range(n):  # what they import takes seconds, too
            executor.submit(cores)
        try:
            yield executor
        except BrokenProcessPool as error:
            raise HeaprLabError(
                "a worker process was ended from outside, mostly for lack of memory; "
                "run again with --workers 1: what was done is in the cache"
            ) from error
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def run_steps(
    steps: Sequence[Step],
    bench: Workbench,
    executor: concurrent.futures.Executor | None,
    *,
    progress: Progress,
) -> list[Any]:
    """What every step gives, in the executor's processes or one by one in this one.

    What was done before a step fails stays in the cache.
    """
    if executor is None:
        given = []
        for done, step in enumerate(steps, start=1):
            given.append(step(bench))
            progress(done, len(steps))
        return given
    futures = [executor.submit(_work, step) for step in steps]
    waiting = concurrent.futures.as_completed(futures)
    for done, future in enumerate(waiting, start=1):
        future.result()
        progress(done, len(steps))
    return [future.result() for future in futures]


def _begin(open_bench: Callable[[], Workbench], threads: int) -> None:
    """What a new process does first."""
    signal.signal(signal.SIGINT, _leave)
    _of_this_process.append(functools.cache(open_bench))
    os.environ["HEAPR_LAB_PROGRESS"] = "0"  # one bar is enough
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of kernels that it starts
    torch.set_num_threads(threads)


def _leave(*_args: object) -> None:
    """End at once and without a word: the process that was started first says it all.

    What is written has temporary names until it is whole, and locks end with a process.
    """
    os._exit(130)


def _work(step: Step) -> Any:
    return step(_of_this_process[0]())
