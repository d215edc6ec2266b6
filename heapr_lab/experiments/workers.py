"""Steps of a run in several processes that share a cache.

A small model leaves cores idle, because its matrix products are too small to be
divided. Steps that share only the cache can run in separate processes instead.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from heapr_lab.errors import HeaprLabError
from heapr_lab.progress import Progress

if TYPE_CHECKING:  # notebooks are executed without torch
    from heapr_lab.workbench.workbench import Workbench

Step = Callable[["Workbench"], Any]
"""A part of a run that fills the cache; it and its result can be pickled."""

_SMALL = 200_000_000
"""Parameters below which a process for each core is faster than threads of one."""
_AT_MOST = 8

_of_this_process: list[Callable[[], "Workbench"]] = []
"""The function that opens the workbench of this process, in a process of a pool."""


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers(bench: "Workbench") -> int:
    """The number of cores (at most 8) for a small model on the CPU, else one."""
    weights = list(bench.model.parameters())
    small = sum(weight.numel() for weight in weights) < _SMALL
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    return min(cores(), _AT_MOST) if small and on_cpu else 1


def threads_of(n: int) -> int:
    """Threads for each of `n` processes, which share the cores."""
    return max(1, cores() // n)


@contextlib.contextmanager
def workers(n: int, open_bench: Callable[[], "Workbench"]) -> Iterator[Executor | None]:
    """A pool of `n` processes that share the cores, while this one waits for them.

    Each opens its own workbench when it needs it. A script that calls this has to guard
    the call with `if __name__ == "__main__"`, as for any process pool.

    Args:
        n: number of processes; 1 gives None in place of a pool.
        open_bench: opens the workbench; it has to be picklable.

    Raises:
        HeaprLabError: a process was killed.
    """
    if n == 1:
        yield None
        return
    pool = ProcessPoolExecutor(
        n,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(open_bench, threads_of(n)),
    )
    try:
        yield pool
    except BrokenProcessPool as error:
        raise HeaprLabError(
            "a worker process was killed, most likely for lack of memory; run "
            "again with --workers 1: finished steps are in the cache"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def run_steps(
    steps: Sequence[Step],
    bench: "Workbench",
    executor: Executor | None,
    *,
    progress: Progress,
) -> list[Any]:
    """Results of all steps, run by the executor, or here where there is none.

    Each process takes the next step whenever it is free. If a step fails, its error is
    raised at once, and the results of finished steps stay in the cache.
    """
    if executor is None:
        results = []
        for done, step in enumerate(steps, 1):
            results.append(step(bench))
            progress(done, len(steps))
        return results
    futures = [executor.submit(_work, step) for step in steps]
    for done, future in enumerate(as_completed(futures), 1):
        future.result()
        progress(done, len(steps))
    return [future.result() for future in futures]


def _begin(open_bench: Callable[[], "Workbench"], threads: int) -> None:
    """Initialise a new process."""
    import torch

    signal.signal(signal.SIGINT, _leave)
    os.environ["HEAPR_LAB_PROGRESS"] = "0"  # one bar is enough
    _of_this_process.append(functools.cache(open_bench))
    torch.set_num_threads(threads)


def _leave(*_args: object) -> None:
    """Exit at once and silently: the main process reports the interruption.

    Files have temporary names until they are complete, and locks end with a process.
    """
    os._exit(130)


def _work(step: Step) -> Any:
    return step(_of_this_process[0]())
