"""Steps of a run in several processes that share a cache.

A small model leaves cores idle, because its matrix products are too small to be
divided. Steps that share only the cache can run in separate processes instead.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from heapr_lab.errors import HeaprLabError
from heapr_lab.progress import Progress

if TYPE_CHECKING:  # notebooks are executed without torch
    from heapr_lab.workbench.workbench import Workbench

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Step = Callable[["Workbench"], Any]
"""A part of a run that fills the cache; it and its result can be pickled."""

_SMALL = 200_000_000
"""Parameters below which a process for each core is faster than threads of one."""
_AT_MOST = 8

_of_this_process: list[Callable[[], "Workbench"]] = []
"""In a process of a pool: the function that opens its workbench."""


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


@contextlib.contextmanager
def workers(
    n: int, open_bench: Callable[[], "Workbench"]
) -> Iterator[concurrent.futures.Executor | None]:
    """Let this process and `n` - 1 others share the cores: a pool of the others.

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
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads := max(1, cores() // n))
    try:
        with pool(n - 1, threads=threads, open_bench=open_bench) as executor:
            yield executor
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def pool(
    n: int, *, threads: int, open_bench: Callable[[], "Workbench"] | None = None
) -> Iterator[concurrent.futures.Executor]:
    """`n` processes, with as many threads each.

    Raises:
        HeaprLabError: a process was killed.
    """
    with concurrent.futures.ProcessPoolExecutor(
        n,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(open_bench, threads),
    ) as executor:
        for _ in range(n):  # their imports take seconds, too
            executor.submit(cores)
        try:
            yield executor
        except BrokenProcessPool as error:
            raise HeaprLabError(
                "a worker process was killed, most likely for lack of memory; run "
                "again with --workers 1: finished steps are in the cache"
            ) from error
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def run_steps(
    steps: Sequence[Step],
    bench: "Workbench",
    executor: concurrent.futures.Executor | None,
    *,
    progress: Progress,
) -> list[Any]:
    """Results of all steps, run here and by the executor, if there is one.

    If a step fails, the results of finished steps stay in the cache.
    """
    others = [executor.submit(_work, step) for step in steps] if executor else []
    results: dict[int, Any] = {}
    for place, result in _results(steps, bench, dict(enumerate(others))):
        results[place] = result
        progress(len(results), len(steps))
    return [results[place] for place in range(len(steps))]


def _results(
    steps: Sequence[Step],
    bench: "Workbench",
    others: dict[int, concurrent.futures.Future[Any]],
) -> Iterator[tuple[int, Any]]:
    """The place and the result of each step, once it is done.

    This process takes those that none of the `others` has begun.
    """
    for place, step in enumerate(steps):
        if place not in others or others[place].cancel():
            others.pop(place, None)
            yield place, step(bench)
        for there in [there for there, future in others.items() if future.done()]:
            yield there, others.pop(there).result()
    places = {future: place for place, future in others.items()}
    for future in concurrent.futures.as_completed(places):
        yield places[future], future.result()


def finished(
    calls: Mapping[K, Callable[[], T]], executor: concurrent.futures.Executor | None
) -> Iterator[tuple[K, concurrent.futures.Future[T]]]:
    """Each call when it is done, run by the executor or, without one, here.

    Args:
        calls: what to call, by name; with an executor, it can be pickled.
        executor: runs them in parallel.
    """
    if executor is None:
        for name, call in calls.items():
            yield name, _called(call)
        return
    names = {executor.submit(call): name for name, call in calls.items()}
    for future in concurrent.futures.as_completed(names):
        yield names[future], future


def _called(call: Callable[[], T]) -> concurrent.futures.Future[T]:
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    try:
        future.set_result(call())
    except HeaprLabError as error:
        future.set_exception(error)
    return future


def _begin(open_bench: Callable[[], "Workbench"] | None, threads: int) -> None:
    """Initialise a new process."""
    signal.signal(signal.SIGINT, _leave)
    os.environ["HEAPR_LAB_PROGRESS"] = "0"  # one bar is enough
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for notebook kernels it starts
    if open_bench is not None:
        import torch

        _of_this_process.append(cache(open_bench))
        torch.set_num_threads(threads)


def _leave(*_args: object) -> None:
    """Exit at once and silently: the main process reports the interruption.

    Files have temporary names until they are complete, and locks end with a process.
    """
    os._exit(130)


def _work(step: Step) -> Any:
    return step(_of_this_process[0]())
