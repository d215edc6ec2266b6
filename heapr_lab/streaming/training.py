"""Train a model whose weights stay on disk: each step is two sweeps over its layers.

On the way back a layer hands out the gradients of its weights, which go to a store. How
far they have to be clipped is known after the last one. So the weights of a part are
changed when it is next read, which makes the next version of them: it has the number of
the steps that they have taken. What belongs to a version is not written again, so a
step that was cut off is run again from the same weights, to the same bits.
"""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heapr_lab.models.backend import Gradient, Tensors, TrainingPlan
from heapr_lab.models.ragged_experts import RaggedExperts
from heapr_lab.progress import Progress
from heapr_lab.streaming.stream import OUTSIDE, Stream, put_tensor, tensor_of
from heapr_lab.streaming.sweep_store import SweepStore, budget_of, durable, temporary
from heapr_lab.streaming.two_sweeps import weight_gradients

LARGEST_NORM = 1.0
"""The norm of all gradients, beyond which they are clipped."""
_WEIGHTS, _GRADIENTS, _MOMENTS = "weights", "gradients", "moments"
_JOURNAL = "journal"


def folder_of(state: Path) -> Path:
    """The folder of a streamed training, beside the file of one in memory."""
    return state.with_suffix(".training")


class StreamedTraining:
    """A training, by which the streamed model reads its weights from here on.

    The protocols are `heapr_lab.models.backend.Training` and `Reader`.
    """

    parameters: Sequence[nn.Parameter] = ()

    def __init__(self, stream: Stream, plan: TrainingPlan) -> None:
        """Go on from the files in a folder beside the plan's state, if there are any.

        Raises:
            CacheError: they belong to another training.
            SpecError: there is no room for them.
        """
        self._stream, self._plan, self._read = stream, plan, stream.reader
        budget = budget_of(stream)
        if plan.state is None:
            store = temporary(budget // 2)
        else:
            store = durable(
                folder_of(plan.state), {"pass": plan.key}, budget=budget // 2
            )
        self._store = store
        store.begin("training")
        self._states = SweepStore(store.folder, budget=budget // 4, durable=False)
        self._states.begin("states")
        parts = {number: part.names for number, part in stream.parts.items()}
        trained = {*plan.names}
        self._names = {
            number: [name for name in names if name in trained]
            for number, names in [*parts.items(), (OUTSIDE, stream.outside)]
        }
        self._journal: Tensors = {}
        self._norms: dict[str, torch.Tensor] = {}
        self._version = self._best = 0
        self._finished = False
        if _JOURNAL not in store:
            weights = {name: tensor_of(stream.model, name) for name in plan.names}
            store.check_room(
                5 * sum(weight.nbytes for weight in weights.values()),
                what="the best and the last weights, a gradient and two moments",
            )
            outside = {name: weights[name] for name in self._names[OUTSIDE]}
            store.put(_named(_WEIGHTS, OUTSIDE, 0), outside)
        stream.reader = self

    # --- as a training ----------------------------------------------------------------

    def resume(self) -> Tensors:
        """The notes of the last step, from whose weights it goes on."""
        if _JOURNAL in self._store:
            self._journal = self._store.get(_JOURNAL)
            self._version, self._best = self._journal["versions"].tolist()
            self._renew()
        return self._journal

    def add_gradients(
        self, ids: torch.Tensor, batch_size: int, gradient: Gradient, progress: Progress
    ) -> None:
        """Two sweeps; the gradients of a layer are kept when it has run back."""
        weight_gradients(
            self._stream, ids, batch_size, gradient, self, self._states, progress
        )

    def step(self, share: float, notes: Tensors) -> None:
        """Begin the next version, which is made of the gradients when it is read."""
        best = self._journal["versions"].tolist()[1] if self._journal else 0
        self._version += 1
        self._journal = {
            **notes,
            "versions": torch.tensor([self._version, self._best]),
            "share": torch.tensor(share, dtype=torch.float64),
            "norm": nn.utils.get_total_norm([*self._norms.values()]),
        }
        self._store.put(_JOURNAL, dict(self._journal))
        for number in self._names if best != self._best else ():
            self._store.drop(_named(_WEIGHTS, number, best))
        self._renew()

    def keep(self) -> None:
        """This version is the best."""
        self._best = self._version

    def finish(self) -> None:
        """Read the best version from here on."""
        self._version, self._finished = self._best, True
        for kind in (_GRADIENTS, _MOMENTS):
            self._store.drop(kind)
        self._renew()

    def weights(self, number: int) -> dict[str, nn.Parameter]:
        """The trained weights of a part that is in memory."""
        model: Any = self._stream.model
        return {name: model.get_parameter(name) for name in self._names[number]}

    def take(self, number: int, gradients: dict[str, torch.Tensor]) -> None:
        """Keep the gradients of a part by this version of its weights."""
        norms = {name: torch.linalg.vector_norm(g) for name, g in gradients.items()}
        self._norms = norms if number == OUTSIDE else self._norms | norms
        self._store.put(_named(_GRADIENTS, number, self._version), gradients)

    # --- as a reader ------------------------------------------------------------------

    @property
    def n_bytes_read(self) -> int:
        """The bytes that the reader before it has read."""
        return self._read.n_bytes_read

    @property
    def state(self) -> str:
        """A digest of that of the reader before it, and of the version."""
        text = f"{self._read.state} {self._version} {self._finished}"
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, number: int, names: Collection[str]) -> None:
        """Give the model the tensors of a part; they are changed now, if that is due.

        Raises:
            CacheError: a file is missing or damaged.
        """
        self._read.read(number, names)
        self._give(number)

    def prepare(self, names: Collection[str]) -> None:
        """The reader before it reads ahead."""
        self._read.prepare(names)

    # --- versions ---------------------------------------------------------------------

    def _renew(self) -> None:
        """Drop what the model has of another version."""
        self._stream.drop()
        self._stream.fingerprint = None
        self._give(OUTSIDE)

    def _give(self, number: int) -> None:
        """Give the model this version of a part, unless it is what has been read."""
        if not self._names[number] or not (self._version or number == OUTSIDE):
            return
        name = _named(_WEIGHTS, number, self._version)
        if name not in self._store:
            self._change(number)
        for path, stored in self._store.get(name).items():
            stem, _, leaf = path.rpartition(".")
            stream, model = self._stream, self._stream.model
            tensor = stored.to(stream.device)
            is_expert = isinstance(model.get_submodule(stem), RaggedExperts)
            if self._finished and (is_expert or not stream.types.stays(model, path)):
                tensor = stream.rounded(leaf, tensor)
            put_tensor(model, path, tensor)

    @torch.no_grad()
    def _change(self, number: int) -> None:
        """Make this version of a part from the one before, and drop that.

        Raises:
            CacheError: a file is missing or damaged.
        """
        before, device = self._version - 1, self._stream.device

        def kept(kind: str) -> Tensors:
            return self._store.get(_named(kind, number, before))

        stored = before or number == OUTSIDE
        old: Tensors = kept(_WEIGHTS) if stored else self.weights(number)
        new = {k: nn.Parameter(w.to(device, copy=True)) for k, w in old.items()}
        for name, gradient in kept(_GRADIENTS).items():
            new[name].grad = gradient.to(device, copy=True)
        optimizer = self._plan.optimizers(new, self._journal["share"].item())
        for key, moment in (kept(_MOMENTS) if before else {}).items():
            kind, _, name = key.partition(".")
            place = moment.device if kind == "step" else device  # as Adam has them
            optimizer.state[new[name]][kind] = moment.to(place, copy=True)
        norm = self._journal["norm"]
        nn.utils.clip_grads_with_norm_(new.values(), LARGEST_NORM, norm)
        optimizer.step()
        states = {name: optimizer.state[weight] for name, weight in new.items()}
        moments = {f"{k}.{name}": m for name, s in states.items() for k, m in s.items()}
        self._store.put(_named(_MOMENTS, number, self._version), moments)
        self._store.put(_named(_WEIGHTS, number, self._version), dict(new))
        for kind in (_GRADIENTS, _MOMENTS, _WEIGHTS):
            if kind != _WEIGHTS or before != self._best:
                self._store.drop(_named(kind, number, before))


def _named(kind: str, number: int, version: int) -> str:
    return f"{kind}-{number}-{version:09d}"
