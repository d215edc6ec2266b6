"""Steps of a run in several processes that share a cache.

A small model leaves cores idle, because its matrix products are too small to be
divided. Steps that share only the cache can run in separate processes instead.
"""

import collections
import contextlib
import functools
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
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
    torch.set_num_threads(threads_of(n))
    pool = ProcessPoolExecutor(
        n - 1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(open_bench, threads_of(n)),
    )
    try:
        for _ in range(n - 1):  # their imports take seconds, too
            pool.submit(cores)
        yield pool
    except BrokenProcessPool as error:
        raise HeaprLabError(
            "a worker process was killed, most likely for lack of memory; run "
            "again with --workers 1: finished steps are in the cache"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def run_steps(
    steps: Sequence[Step],
    bench: "Workbench",
    executor: Executor | None,
    *,
    progress: Progress,
) -> list[Any]:
    """Results of all steps, run here and by the executor, if there is one.

    This process and each of the others take the next step whenever they are free. If a
    step fails, the results of finished steps stay in the cache.
    """
    waiting = collections.deque(enumerate(steps))
    outcomes: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()

    def serve() -> None:
        """Have another process do the next of what waits, until there is none."""
        with contextlib.suppress(IndexError):
            while True:
                place, step = waiting.popleft()
                call = functools.partial(_there, executor, step)
                outcomes.put((place, _called(call)))

    for _ in range(getattr(executor, "_max_workers", 0)):
        threading.Thread(target=serve, daemon=True).start()  # ends with the process
    results: dict[int, Any] = {}
    while len(results) < len(steps):
        with contextlib.suppress(IndexError):
            place, step = waiting.popleft()
            outcomes.put((place, _called(functools.partial(step, bench))))
        place, future = outcomes.get()
        results[place] = future.result()
        progress(len(results), len(steps))
    return [results[place] for place in range(len(steps))]


def _there(executor: Any, step: Step) -> Any:
    """What a step comes to in another process."""
    return executor.submit(_work, step).result()


def _called(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # whoever asks for the result gets it
        future.set_exception(error)
    return future


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
