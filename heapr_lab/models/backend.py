"""The seam for where the weights of a model are: in memory, or on disk.

What depends on it is asked of the backend of a model, so that all other code is the
same for both. `Backend` is that of every model that has no other; what keeps weights
elsewhere registers a subclass of it on the modules of a model.

Shapes: B windows, L tokens in each; d_model; E n_experts.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from heapr_lab.errors import LayoutError
from heapr_lab.models.formats import stays_float32
from heapr_lab.models.weights_hash import block_sums
from heapr_lab.progress import Progress

_KEY = "heapr_backend"

Tensors = Mapping[str, torch.Tensor]
States = Callable[[torch.Tensor], torch.Tensor]
"""From token ids (B, L) to the final states, (B, L, d_model)."""
Change = Callable[[str, torch.Tensor], torch.Tensor]
"""From a tensor's name and values to those that it has in another model."""
Optimizers = Callable[[Mapping[str, nn.Parameter], float], torch.optim.Optimizer]
"""From parameters by name, and a share of their rates, to what changes them."""
Gradient = Callable[[slice, torch.Tensor], torch.Tensor]
"""From some windows and their final states to the gradient of the loss by these."""


@dataclass(frozen=True)
class NewModule:
    """A module that takes the place of one with weights in a decoder layer."""

    layer: int
    """Number of the decoder layer."""
    name: str
    """Path of the module in its model."""
    module: nn.Module
    """The one that is replaced."""
    empty: Callable[[nn.Module], nn.Module]
    """Makes the new one, without values, from one like `module`."""
    made: Callable[[], nn.Module]
    """Makes the new one from the weights of `module`."""


class GradientPass(Protocol):
    """A pass with gradients over windows of tokens, which can be resumed."""

    ids: torch.Tensor
    """Token ids of all windows, (n_windows, L)."""
    batch_size: int
    done: int
    """Windows that are measured, in this process or an earlier one."""
    state: Path | None
    """Where an unfinished pass is kept."""
    key: str
    """Hash of all that determines the result."""

    @property
    def layers(self) -> Sequence[Any]:
        """The MoE layers."""

    @property
    def probes(self) -> Mapping[int, Any]:
        """What has the sums of each layer, by layer."""

    @property
    def progress(self) -> Progress:
        """Called with (windows done, all windows)."""

    def weighed(self, layer: int) -> Tensors:
        """The squared norms of a layer's weights, to ask while they are in memory."""

    def loss(self, windows: slice, states: torch.Tensor | None = None) -> torch.Tensor:
        """The summed loss of some windows, from their final states if these are known.

        Shapes: states (B, L, d_model).
        """

    def finish(self, stop: int, *, save: bool = False) -> None:
        """All windows before `stop` are measured, which may be saved, or has to be."""

    def check(self, number: int, windows: slice) -> None:
        """Check what a layer has just been measured on, these windows."""

    def batches(self) -> None:
        """The pass through all layers at once, for a model in memory."""


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, and how."""

    names: Sequence[str]
    """Names of the weights."""
    optimizers: Optimizers
    """Makes what changes them, or those of a part."""
    state: Path | None
    """Names the place in which an unfinished training is kept."""
    key: str
    """Hash of all that determines the result."""


class Training(Protocol):
    """Weights of a model that are trained."""

    parameters: Sequence[nn.Parameter]
    """Those that are in memory together: all, or none."""

    def resume(self) -> Tensors:
        """Go on where an earlier process was; returns its notes, among others."""

    def add_gradients(
        self, ids: torch.Tensor, batch_size: int, gradient: Gradient, progress: Progress
    ) -> None:
        """Run windows of tokens (n_windows, L) to the loss and back."""

    def step(self, share: float, notes: Tensors) -> None:
        """Change the weights by a share of their rates; `notes` are kept with them."""

    def keep(self) -> None:
        """Keep the weights as they are now: they are the best so far."""

    def finish(self) -> None:
        """Let the model have the best weights."""


@dataclass(frozen=True)
class FileTypes:
    """The types in which the weights of a model are written."""

    dtype: torch.dtype
    """That of most of them."""
    wide: frozenset[str] = frozenset()
    """Names of what stays in float32, as in the dense model's files."""
    packing: Any = None
    """How they are quantised, if they are: `Fp8Files`."""

    def stays(self, model: Any, name: str) -> bool:
        """Whether a tensor outside the experts is written as it is."""
        return name in self.wide or stays_float32(model, name)

    def rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is not as in files, by its last name, as it will be there."""
        rounded = tensor.to(self.dtype)
        if self.packing is not None:
            rounded = self.packing.rounded(name, rounded)
        return rounded.to(tensor.dtype)


class Backend:
    """What differs with where the weights of a model are: here all are in memory."""

    place = ""
    """Where weights are that are not in memory, in a word or two."""
    runs_whole = True
    """Whether one call runs all layers, which may have its own positions and mask."""

    def device(self, weight: torch.Tensor) -> torch.device:
        """Device of a weight once it is in memory."""
        return weight.device

    def dtype(self, weight: torch.Tensor) -> torch.dtype:
        """Type of a weight once it is in memory."""
        return weight.dtype

    def weight(self, module: Any, name: str) -> Any:
        """A parameter of a module by its name, in memory, or None if it has none."""
        return getattr(module, name)

    def require_loaded(self, *, remedy: str) -> None:
        """Check that all weights are in memory together; else `remedy` is advised."""

    def state(self, model: nn.Module) -> str:
        """A cheap digest that changes with the weights, in this process.

        It is of addresses, torch's counts of writes, and first values: that of each row
        and column shows most writes through `.data`, which torch does not count.
        """
        sha = hashlib.sha256()
        parts: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in model.state_dict(keep_vars=True).values():
            version = None if tensor.is_inference() else tensor._version
            sha.update(repr((tensor.data_ptr(), version, tensor.dtype)).encode())
            if not tensor.is_meta:
                parts.setdefault(tensor.device, []).append(
                    _first_values(tensor.detach())
                )
        for values in parts.values():  # together, as each transfer from a device waits
            sha.update(torch.cat(values).cpu().numpy().tobytes())
        return sha.hexdigest()

    def fingerprint(self, model: nn.Module) -> str:
        """A digest of every parameter and stored buffer, with its name and shape.

        It is the same in every process and on every device.

        Raises:
            LayoutError: weights are offloaded.
        """
        sha = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            if tensor.is_meta:
                raise LayoutError(
                    f"{name} is offloaded, its values are not in memory; expected a "
                    "model that fits: load it without offloading, on large enough "
                    "devices"
                )
            sha.update(f"{name}{tuple(tensor.shape)}".encode())
            sha.update(block_sums(tensor))
        return sha.hexdigest()

    def at_once(self, model: nn.Module, n: int) -> int:  # noqa: ARG002
        """Tokens, or texts, to run together where a model in memory runs `n`."""
        return n

    def final_states(
        self,
        model: nn.Module,  # noqa: ARG002
        batches: Sequence[torch.Tensor],
        run: States,
        share: float,  # noqa: ARG002
    ) -> Iterator[torch.Tensor]:
        """What `run` gives for each batch, on any device, within a share of its room.

        It is run when a result is asked for, in the contexts that there are then.
        """
        return map(run, batches)

    def backward(
        self,
        model: nn.Module,  # noqa: ARG002
        run: GradientPass,
    ) -> None:
        """Run all windows to the loss and back: through the whole model, by batches."""
        run.batches()

    def weight_gradients(
        self,
        model: nn.Module,  # noqa: ARG002
        ids: torch.Tensor,
        batch_size: int,
        run: States,
        gradient: Gradient,
        trained: Any,  # noqa: ARG002
        progress: Progress,
    ) -> None:
        """Run windows of tokens (n_windows, L) to the loss and back, batch by batch.

        The weights that require gradients have their sums then; those of a layer that
        leaves the memory are handed to `trained`.
        """
        for start in range(0, len(ids), batch_size):
            windows = slice(start, min(start + batch_size, len(ids)))
            states = run(ids[windows])
            states.backward(gradient(windows, states))
            progress(windows.stop, len(ids))

    def training(self, plan: TrainingPlan) -> Training | None:  # noqa: ARG002
        """The training of weights that are not in memory together; None if they are."""
        return None

    def when_needed(
        self, read: Callable[[], torch.Tensor]
    ) -> torch.Tensor | Callable[[], torch.Tensor]:
        """What `read` gives, or `read` itself if it is called when the layer runs."""
        return read()

    def copy(
        self, model: nn.Module, memo: dict[int, Any], new: Sequence[NewModule]
    ) -> nn.Module:
        """A copy of the model, with new modules; `memo` as of `copy.deepcopy`."""
        # To `deepcopy`, a module that is replaced is copied already: to its new one.
        memo |= {id(replacement.module): replacement.made() for replacement in new}
        return copy.deepcopy(model, memo)

    def replaced(self, model: nn.Module, new: Sequence[NewModule]) -> nn.Module:
        """The model with new modules: itself, if it can be changed."""
        for replacement in new:
            put(model, replacement.name, replacement.made())
        return model

    @torch.no_grad()
    def given(
        self,
        new: Any,
        model: nn.Module,
        experts: Mapping[int, tuple[str, Callable[[], Tensors]]],
        change: Change,
    ) -> Any:
        """`new`, which has no weights, with those of a pruned `model`.

        Args:
            new: a model with modules of the same names.
            model: the pruned model.
            experts: by layer, the name of the module of its experts, and what makes
                its tensors from those of `model`.
            change: the change of all other tensors.
        """
        state = {k: change(k, tensor) for k, tensor in model.state_dict().items()}
        for stem, tensors in experts.values():
            for name, _ in model.get_submodule(stem).named_parameters(recurse=False):
                del state[f"{stem}.{name}"]
            state |= {f"{stem}.{name}": tensor for name, tensor in tensors().items()}
        new.load_state_dict(state, assign=True)
        new.tie_weights()
        return new

    def sliced_from(self) -> str | None:
        """The state of the files that are read while it is written; None in memory."""
        return None

    def casts(self, types: FileTypes) -> bool:  # noqa: ARG002
        """Whether weights will be rounded when read, and cast when written."""
        return False

    def write(
        self,
        model: Any,
        folder: Path,
        *,
        max_shard_size: str,
        progress: Progress,  # noqa: ARG002
    ) -> dict[str, str]:
        """Write weights and configuration as `save_pretrained` does.

        Returns the SHA-256 of each file of weights, where it is known.
        """
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return {}


_IN_MEMORY = Backend()


def backend_of(module: nn.Module) -> Backend:
    """The backend of a model, or of a module of it."""
    backend: Backend = module.__dict__.get(_KEY, _IN_MEMORY)
    return backend


def register(model: nn.Module, backend: Backend) -> None:
    """Make `backend` that of a model and its modules."""
    for module in model.modules():
        module.__dict__[_KEY] = backend


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Make `module` that of the path `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _first_values(tensor: torch.Tensor) -> torch.Tensor:
    """The first value of each row and column of the matrices in `tensor`, as bytes."""
    if tensor.dim() < 2:
        parts = [tensor.reshape(-1)]
    else:
        parts = [tensor[..., 0].reshape(-1), tensor[..., 0, :].reshape(-1)]
    return torch.cat(parts).contiguous().view(torch.uint8)
