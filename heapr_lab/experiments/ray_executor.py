"""An executor of `concurrent.futures` on a Ray cluster: extra `cluster`.

Ray itself runs a task again, elsewhere, if its worker or machine dies.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ray


class RayExecutor(Executor):
    """Runs each submitted call as a task of Ray.

    Example:
        >>> ray.init()  # doctest: +SKIP
        >>> grid.run("spec.toml", executor=RayExecutor(num_gpus=1))  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        """Use the cluster that `ray.init` connected to.

        Args:
            **options: of `ray.remote`: `num_cpus`, `num_gpus`, `max_retries` (times
                that a task whose worker died is run again; 3 by default), ...
        """
        self._remote = ray.remote(**{"num_cpus": 1, **options})(_call)

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Begin `fn(*args, **kwargs)` on a worker."""
        found: Future[Any] = self._remote.remote(fn, args, kwargs).future()
        return found


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)
