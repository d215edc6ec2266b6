"""Train a model whose weights stay on disk: each step is two sweeps over its layers.

On the way back a layer hands out the gradients of its weights, which go to a store. How
far they have to be clipped is known after the last one. So the weights of a part are
changed when it is next read, which makes the next version of them: it has the number of
the steps that they have taken. What belongs to a version is not written again, so a
step that was cut off is run again from the same weights, to the same bits.
"""

import contextlib
import hashlib
import shutil
import weakref
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from heapr_lab.models.backend import Gradient, Optimizers, Tensors
from heapr_lab.models.ragged_experts import RaggedExperts
from heapr_lab.progress import Progress
from heapr_lab.streaming.stream import OUTSIDE, Stream, put_tensor, tensor_of
from heapr_lab.streaming.sweep_store import (
    SweepStore,
    budget_of,
    durable,
    temporary,
)
from heapr_lab.streaming.two_sweeps import TwoSweeps

LARGEST_NORM = 1.0
"""The norm of all gradients, beyond which they are clipped."""
_JOURNAL, _NOTE = "journal", "note."


class StreamedTraining:
    """The training of a streamed model, which has its weights from here on.

    The protocol is `heapr_lab.models.backend.Training`.
    """

    parameters: Sequence[nn.Parameter] = ()

    def __init__(
        self,
        stream: Stream,
        names: Sequence[str],
        optimizers: Optimizers,
        *,
        state: Path | None,
        key: str,
    ) -> None:
        """Nothing is read but what an earlier process kept.

        Args:
            stream: what reads the model.
            names: of the weights that are trained.
            optimizers: makes what changes the weights of a part.
            state: files are in a folder beside it; without it they are temporary.
            key: hash of all that determines the training.

        Raises:
            CacheError: the folder belongs to another training.
            SpecError: there is no room.
        """
        budget = budget_of(stream)
        self._folder = None if state is None else state.with_suffix(".training")
        store = (
            temporary(budget // 2)
            if self._folder is None
            else durable(self._folder, {"pass": key}, budget=budget // 2)
        )
        store.begin("training")
        self._states = SweepStore(store.folder, budget=budget // 4, durable=False)
        self._states.begin("states")
        self._weights = TrainedReader(stream, names, optimizers, store)
        self._stream, self._norms = stream, dict[str, torch.Tensor]()
        stream.reader = self._weights

    def resume(self) -> Tensors:
        """The notes of the last step, from whose weights it goes on."""
        return self._weights.resume()

    def add_gradients(
        self, ids: torch.Tensor, batch_size: int, gradient: Gradient, progress: Progress
    ) -> None:
        """Two sweeps; the gradients of a layer are kept when it has run back."""

        def loss(windows: slice, states: torch.Tensor) -> torch.Tensor:
            return (states * gradient(windows, states)).sum()

        run: Any = SimpleNamespace(ids=ids, batch_size=batch_size, loss=loss)
        run.layers, run.probes, run.progress = (), {}, progress
        self._states.drop("")  # of a step that was cut off
        sweeps = _Sweeps(self._stream, run, self._states, self._weights)
        with self._stream.lock:
            sweeps.forward()
            for _ in sweeps.backward():
                pass
        self._states.drop("")
        self._norms = sweeps.norms

    def step(self, share: float, notes: Tensors) -> None:
        """Begin the next version of the weights."""
        total = nn.utils.get_total_norm([*self._norms.values()])
        self._weights.advance(share, total, notes)

    def keep(self) -> None:
        """This version is the best."""
        self._weights.best = self._weights.version

    def finish(self) -> None:
        """Read the best version from here on; files are removed with the reader."""
        self._weights.finish()
        if self._folder is not None:
            weakref.finalize(
                self._weights, shutil.rmtree, self._folder, ignore_errors=True
            )


class TrainedReader:
    """Gives a model the weights that another reader does, but for those trained."""

    def __init__(
        self,
        stream: Stream,
        names: Collection[str],
        optimizers: Optimizers,
        store: SweepStore,
    ) -> None:
        """The first version is what the stream reads.

        Args:
            stream: what reads the model.
            names: of the weights that are trained.
            optimizers: makes what changes the weights of a part.
            store: for weights, gradients and moments.

        Raises:
            SpecError: there is no room for them.
        """
        self._stream, self._before = stream, stream.reader
        self._optimizers, self._store = optimizers, store
        parts = {number: part.names for number, part in stream.parts.items()}
        trained = {*names}
        self.names = {
            number: [name for name in part if name in trained]
            for number, part in [*parts.items(), (OUTSIDE, stream.outside)]
        }
        """Names of the trained weights of each part."""
        self.version = self.best = self._noted_best = 0
        self._share, self._norm = 0.0, torch.zeros(())
        self._finished = False
        if _JOURNAL not in store:
            weights = [tensor_of(stream.model, name) for name in trained]
            store.check_room(
                5 * sum(weight.nbytes for weight in weights),
                what="the best and the last weights, a gradient and two moments",
            )
            store.put(_named("weights", OUTSIDE, 0), self._in_memory(OUTSIDE))

    # --- as a reader ------------------------------------------------------------------

    @property
    def n_bytes_read(self) -> int:
        """The bytes that the other reader has read."""
        return self._before.n_bytes_read

    @property
    def state(self) -> str:
        """A digest of that of the other reader, and of the version."""
        text = f"{self._before.state} {self.version} {self._finished}"
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, number: int, names: Collection[str]) -> None:
        """Give the model the tensors of a part; they are changed now, if that is due.

        Raises:
            CacheError: a file is missing or damaged.
        """
        self._before.read(number, names)
        for name, tensor in self._values(number).items():
            put_tensor(self._stream.model, name, self._as_written(name, tensor))

    def prepare(self, names: Collection[str]) -> None:
        """The other reader reads ahead."""
        self._before.prepare(names)

    def _as_written(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device, rounded if it is of experts that are finished."""
        stem, _, leaf = name.rpartition(".")
        tensor = tensor.to(self._stream.device)
        experts = isinstance(self._stream.model.get_submodule(stem), RaggedExperts)
        if self._finished and experts:
            return self._stream.rounded(leaf, tensor)
        return tensor

    # --- versions ---------------------------------------------------------------------

    def resume(self) -> dict[str, torch.Tensor]:
        """Go on with the version that an earlier process began; returns its notes."""
        if _JOURNAL not in self._store:
            return {}
        journal = self._store.get(_JOURNAL)
        self.version, self.best = journal["versions"].tolist()
        self._noted_best = self.best
        self._share, self._norm = journal["share"].item(), journal["norm"]
        self._renew()
        return {
            name.removeprefix(_NOTE): note
            for name, note in journal.items()
            if name.startswith(_NOTE)
        }

    def put_gradients(self, number: int, gradients: Tensors) -> None:
        """Keep the gradients of a part by this version of its weights."""
        self._store.put(_named("gradients", number, self.version), dict(gradients))

    def advance(self, share: float, norm: torch.Tensor, notes: Tensors) -> None:
        """Begin the next version, which is made of the gradients when it is read."""
        former, self._noted_best = self._noted_best, self.best
        self.version += 1
        self._share, self._norm = share, norm
        journal = {f"{_NOTE}{name}": note for name, note in notes.items()}
        journal["versions"] = torch.tensor([self.version, self.best])
        journal |= {"share": torch.tensor(share, dtype=torch.float64), "norm": norm}
        self._store.put(_JOURNAL, journal)
        for number in self.names if former != self.best else ():
            self._store.drop(_named("weights", number, former))
        self._renew()

    def finish(self) -> None:
        """The best version is that of the model, and all else is dropped."""
        self.version, self._finished = self.best, True
        for kind in ("gradients", "moments"):
            self._store.drop(kind)
        self._renew()

    def _renew(self) -> None:
        """Drop what the model has of another version."""
        self._stream.drop()
        self._stream.fingerprint = None
        for name, tensor in self._values(OUTSIDE).items():
            put_tensor(self._stream.model, name, tensor.to(self._stream.device))

    def _values(self, number: int) -> Tensors:
        """The trained weights of a part; none if they are what the other reader reads.

        They are on the CPU.
        """
        if not self.names[number] or not (self.version or number == OUTSIDE):
            return {}
        name = _named("weights", number, self.version)
        if name not in self._store:
            self._change(number)
        return self._store.get(name)

    def _in_memory(self, number: int) -> dict[str, torch.Tensor]:
        """A copy of the trained weights of a part that is in memory."""
        model = self._stream.model
        return {name: tensor_of(model, name).clone() for name in self.names[number]}

    @torch.no_grad()
    def _change(self, number: int) -> None:
        """Make the weights of this version, from those of the one before.

        Raises:
            CacheError: a file is missing or damaged.
        """
        before, device = self.version - 1, self._stream.device
        get, put = self._store.get, self._store.put
        first = not before and number != OUTSIDE
        old = (
            self._in_memory(number) if first else get(_named("weights", number, before))
        )
        weights = {k: nn.Parameter(w.to(device, copy=True)) for k, w in old.items()}
        for name, gradient in get(_named("gradients", number, before)).items():
            weights[name].grad = gradient.to(device, copy=True)
        optimizer = self._optimizers(weights, self._share)
        moments = get(_named("moments", number, before)) if before else {}
        for key, moment in moments.items():
            kind, _, name = key.partition(".")
            place = moment.device if kind == "step" else device  # as Adam has them
            optimizer.state[weights[name]][kind] = moment.to(place, copy=True)
        nn.utils.clip_grads_with_norm_(weights.values(), LARGEST_NORM, self._norm)
        optimizer.step()
        moments = {
            f"{kind}.{name}": moment
            for name, weight in weights.items()
            for kind, moment in optimizer.state[weight].items()
        }
        put(_named("moments", number, self.version), moments)
        put(_named("weights", number, self.version), dict(weights))
        kinds = ["gradients", "moments"] + ["weights"] * (before != self.best)
        for kind in kinds:
            self._store.drop(_named(kind, number, before))


def _named(kind: str, number: int, version: int) -> str:
    return f"{kind}-{number}-{version:09d}"


class _Sweeps(TwoSweeps):
    """Two sweeps that hand out the gradients of weights, a part at a time."""

    def __init__(
        self, stream: Stream, run: Any, store: SweepStore, reader: TrainedReader
    ) -> None:
        windows = slice(0, len(run.ids))
        super().__init__(stream.model, stream, run, windows, store)
        self._reader = reader
        self._weights: dict[str, nn.Parameter] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self.norms: dict[str, torch.Tensor] = {}
        """The norm of the gradient of each weight."""

    def of_loss(self) -> None:
        with self._collecting(OUTSIDE):
            super().of_loss()

    def back(self, number: int) -> Iterator[tuple[int, slice]]:
        self._stream.fill(number)
        with self._collecting(number):
            yield from super().back(number)

    @contextlib.contextmanager
    def _collecting(self, number: int) -> Iterator[None]:
        """The gradients of a part are summed here, and kept at the end."""
        model: Any = self._stream.model
        self._weights = {
            name: model.get_parameter(name).requires_grad_()
            for name in self._reader.names[number]
        }
        self._gradients = {}
        try:
            yield
        finally:
            for weight in self._weights.values():
                weight.requires_grad_(False)
        norm = torch.linalg.vector_norm
        self.norms |= {name: norm(g) for name, g in self._gradients.items()}
        self._reader.put_gradients(number, self._gradients)

    def input_grad(
        self,
        output: torch.Tensor,
        states: torch.Tensor,
        gradient: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights = [w.requires_grad_() for w in self._weights.values()]
        before, *gradients = torch.autograd.grad(
            output, [states, *weights], gradient, allow_unused=True
        )
        for name, more in zip(self._weights, gradients, strict=True):
            if more is not None:
                known = self._gradients.get(name)
                self._gradients[name] = more if known is None else known + more
        return before
