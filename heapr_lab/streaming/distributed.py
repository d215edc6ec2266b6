"""Several processes that measure disjoint windows, as torchrun starts them.

Each process ("rank") has a copy of the model. All statistics are sums or maxima over
windows, so the ranks' are combined at the end: by one all-reduce of the sums and one of
the maxima, in float64, on the CPU (gloo). If a rank fails, the others end, too.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.models.moments import MAXIMA, LayerMoments

_PATIENCE = timedelta(days=30)
"""How long a rank waits for the slowest; it does not wait for one that has ended."""
_FAILURE = "heapr_lab/failure"
_ENDED = (
    "another rank has ended before its windows were measured, most likely for lack of "
    "memory, as each holds the model: start fewer ranks, or give --stream"
)
_T = TypeVar("_T")


class Ranks:
    """The processes that work together, as one of them sees them."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        local_rank: int = 0,
        store: Any = None,
    ) -> None:
        """Describe a process of torch's default group.

        Args:
            rank: its number.
            size: number of processes.
            local_rank: its number among those of its machine.
            store: of torch, in which a rank that fails tells the others why.
        """
        self.rank, self.size = rank, size
        self._local_rank, self._store = local_rank, store

    def share(self, n_windows: int) -> range:
        """The windows of this rank: consecutive ones, or none if there are too few.

        Example:
            >>> [list(Ranks(rank, 3).share(5)) for rank in range(3)]
            [[0, 1], [2, 3], [4]]
        """
        each, more = divmod(n_windows, self.size)
        start = self.rank * each + min(self.rank, more)
        return range(start, start + each + (self.rank < more))

    def device(self, asked: str) -> str:
        """The device of this rank: one GPU of its own for `auto`, if there are any.

        Raises:
            SpecError: there are fewer GPUs than ranks.
        """
        n_gpus = torch.cuda.device_count()
        if asked != "auto" or not n_gpus:
            return asked
        if self._local_rank >= n_gpus:
            raise SpecError(
                f"rank {self.rank} has no GPU of its own: there are {n_gpus} here; "
                f"start torchrun with --nproc-per-node {n_gpus}, or give --device cpu"
            )
        return f"cuda:{self._local_rank}"

    def own_state(self, path: Path) -> Path:
        """The file for the state of this rank, where one process would have `path`."""
        return path.with_name(f"{path.stem}.{self.rank}-of-{self.size}{path.suffix}")

    def check_same(self, spec_hash: str) -> None:
        """Check that all ranks measure the same model on the same windows.

        Raises:
            SpecError: they do not.
            HeaprLabError: another rank has failed.
        """
        hashes: list[Any] = [None] * self.size
        self.wait(lambda: distributed.all_gather_object(hashes, spec_hash))
        other = [rank for rank, digest in enumerate(hashes) if digest != hashes[0]]
        if other:
            raise SpecError(
                f"ranks 0 and {other[0]} have different models or windows: give all "
                "of them the same files, settings and devices"
            )

    def combine(self, moments: Sequence[LayerMoments]) -> None:
        """Replace the moments of every rank by those of all ranks' windows together.

        Raises:
            HeaprLabError: another rank has failed.
        """
        states = [layer.state() for layer in moments]
        named = [pair for state in states for pair in state.items()]
        sums = [tensor for name, tensor in named if name not in MAXIMA]
        maxima = [tensor for name, tensor in named if name in MAXIMA]
        self._reduce(sums, distributed.ReduceOp.SUM)
        self._reduce(maxima, distributed.ReduceOp.MAX)
        for layer, state in zip(moments, states, strict=True):
            layer.load_state(state)

    def _reduce(self, tensors: list[torch.Tensor], op: Any) -> None:
        """Replace `tensors` by their sums or maxima over all ranks."""
        flat = torch.cat([tensor.flatten().double() for tensor in tensors])
        self.wait(lambda: distributed.all_reduce(flat, op))
        chunks = flat.split([tensor.numel() for tensor in tensors])
        for tensor, chunk in zip(tensors, chunks, strict=True):
            tensor.copy_(chunk.view_as(tensor))

    def stored(
        self, store: Callable[[Callable[[], _T]], _T], compute: Callable[[], _T]
    ) -> _T | None:
        """`store(compute)` on rank 0; the others compute only if it does.

        Args:
            store: a cache: gives what is stored, or calls its argument and stores that.
            compute: called by all ranks, or by none.

        Returns:
            The result on rank 0, None on the others.

        Raises:
            HeaprLabError: another rank has failed.
        """
        if self.rank:
            if self._told(None):
                compute()
            return None
        begun = False

        def begin() -> _T:
            nonlocal begun
            begun = self._told(True)
            return compute()

        result = store(begin)
        if not begun:
            self._told(False)
        return result

    def _told(self, begins: bool | None) -> bool:
        """What rank 0 gives."""
        message = [begins]
        self.wait(lambda: distributed.broadcast_object_list(message, src=0))
        return bool(message[0])

    def wait(self, collective: Callable[[], object]) -> None:
        """Take part in a collective operation.

        Raises:
            HeaprLabError: another rank has ended.
        """
        try:
            collective()
        except RuntimeError as error:
            raise HeaprLabError(self._failure() or _ENDED) from error

    def report(self, error: Exception) -> None:
        """Tell the other ranks that this one fails, unless another has before."""
        with contextlib.suppress(RuntimeError):  # the store has ended, too
            if self._store is not None and self._failure() is None:
                self._store.set(_FAILURE, f"rank {self.rank} has failed: {error}")

    def _failure(self) -> str | None:
        """How the first rank failed, if it was able to say so."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None and self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE).decode())
        return None


@contextlib.contextmanager
def joined() -> Iterator[Ranks | None]:
    """The ranks if this process is one of several of torchrun, else None.

    Only rank 0 shows progress and warnings.

    Raises:
        HeaprLabError: another rank has failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    store, rank, size = next(rendezvous("env://"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    ranks = Ranks(rank, size, local_rank=local_rank, store=store)
    if rank:
        os.environ["HEAPR_LAB_PROGRESS"] = "0"
        logging.getLogger("heapr_lab").setLevel(logging.ERROR)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE
    )
    try:
        # One that fails at once would else close what others are still opening.
        ranks.wait(distributed.barrier)
        yield ranks
    except Exception as error:
        ranks.report(error)
        raise
    finally:
        distributed.destroy_process_group()
