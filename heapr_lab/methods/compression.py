"""What a method found: how a model is compressed, and what that saves."""

import abc
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.checkpoints.save_dropped import save_dropped
from heapr_lab.models.experts import describe
from heapr_lab.pruning.dropping import KeptExperts, drop_experts, dropping
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import ReplacedDownProj, masking, prune
from heapr_lab.repr_html import card_html


@dataclass(frozen=True, eq=False)
class Made:
    """By which method, and with which settings, a compression was made."""

    method: str
    """Its name in the registry."""
    ratio: float
    """The share of the routed experts' parameters that was asked for."""
    seed: int
    options: Mapping[str, Any]
    tokens: pd.DataFrame | None = None
    """Columns layer, expert, tokens: how calibration text was routed, if measured."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the routing."""
        names = ("method", "ratio", "seed")
        return {n: getattr(self, n) for n in names} | {"options": dict(self.options)}


@dataclass(frozen=True)
class Savings:
    """Sizes of a model before and after compression."""

    parameters: tuple[int, int]
    """Of the whole model, before and after."""
    bytes: tuple[int, int]
    """Of these parameters, in the dtype in which the model is loaded."""
    routed_flops: tuple[float, float]
    """Operations of the routed experts for a mean token. With fewer experts a token is
    still routed to as many of them, so only removing atoms changes it."""


class Compression(abc.ABC):
    """How a model is compressed; made by `Method.fit`.

    `model` in its methods is the dense model it was fitted to. `apply` and
    `materialise` give the same logits.
    """

    made: Made

    @property
    @abc.abstractmethod
    def achieved_ratio(self) -> float:
        """The share of the routed experts' parameters that is removed.

        Counted are weights and biases of atoms; an expert's output bias and router row
        are in `savings`.
        """

    @abc.abstractmethod
    def apply(self, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """A context in which `model` computes what the compressed model computes."""

    @abc.abstractmethod
    def materialise(self, model: nn.Module) -> nn.Module:
        """The compressed model, which shares nothing with `model`."""

    @abc.abstractmethod
    def savings(self, model: nn.Module) -> Savings:
        """What it saves, counted exactly."""

    @abc.abstractmethod
    def save(self, model: nn.Module, folder: Path | str, **options: Any) -> Path:
        """Write the compressed model to a folder that transformers loads."""

    def _facts(self) -> dict[str, str]:
        made = self.made
        settings = ", ".join(f"{name}={value}" for name, value in made.options.items())
        return {
            "method": made.method,
            "ratio, asked for": f"{made.ratio:.4g}",
            "ratio, achieved": f"{self.achieved_ratio:.4g}",
            "options": settings or "none",
            "seed": f"{made.seed}",
        }

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        return card_html(type(self).__name__, self._facts())


@dataclass(frozen=True, eq=False, repr=False)
class AtomCompression(Compression):
    """Atoms are removed; W_down of the others may be replaced."""

    made: Made
    keep: KeepMask
    atom_parameters: Mapping[int, int]
    """Parameters of one atom, by layer."""
    downs: ReplacedDownProj | None = None
    """By layer, the new W_down (E, D, I); None for weights that are unchanged."""

    @property
    def achieved_ratio(self) -> float:
        """The share of the atoms' parameters that is removed."""
        kept = total = 0
        for layer, size in self.atom_parameters.items():
            kept += int(self.keep.by_layer(layer).sum()) * size
            total += self.keep.by_layer(layer).size * size
        return 1 - kept / total if kept < total else 0.0

    def apply(self, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """As `masking`: only this thread's forwards change.

        Raises:
            SpecError: it was fitted to another model.
        """
        return masking(model, self.keep, self.downs)

    def materialise(self, model: nn.Module) -> nn.Module:
        """As `prune`.

        Raises:
            SpecError: it was fitted to another model.
        """
        return prune(model, self.keep, downs=self.downs)

    def savings(self, model: nn.Module) -> Savings:
        """Counted with the routing of the calibration text, if it was measured."""
        dense, tokens = describe(model), self.made.tokens
        after = dense.parameters(self.keep)
        return Savings(
            (dense.n_parameters, after),
            _bytes(dense.bytes_per_parameter, dense.n_parameters, after),
            (
                dense.routed_flops_per_token(None, tokens),
                dense.routed_flops_per_token(self.keep, tokens),
            ),
        )

    def save(self, model: nn.Module, folder: Path | str, **options: Any) -> Path:
        """As `save_pruned`, which takes `options`.

        Raises:
            SpecError: the folder is not empty, or it was fitted to another model.
        """
        facts = _facts(self.made, options)
        return save_pruned(self.materialise(model), folder, facts=facts, **options)


@dataclass(frozen=True, eq=False, repr=False)
class ExpertDropping(Compression):
    """Whole experts are removed with their router rows; weights are unchanged."""

    made: Made
    kept: KeptExperts
    """By layer, the numbers of the kept experts, ascending."""
    atoms: Mapping[int, tuple[int, int, int]]
    """By layer: experts, atoms of each, parameters of one atom."""

    @property
    def achieved_ratio(self) -> float:
        """The share of the experts' parameters that is removed."""
        kept = total = 0
        for layer, (n_experts, d_inter, size) in self.atoms.items():
            kept += len(self.kept[layer]) * d_inter * size
            total += n_experts * d_inter * size
        return 1 - kept / total if kept < total else 0.0

    def apply(self, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """As `dropping`: `model` changes in all threads until the context ends.

        Raises:
            SpecError: it was fitted to another model, or a mask is active.
            LayoutError: experts cannot be dropped from the model exactly.
        """
        return dropping(model, self.kept)

    def materialise(self, model: nn.Module) -> nn.Module:
        """As `drop_experts`.

        Raises:
            SpecError: it was fitted to another model, or a mask is active.
            LayoutError: experts cannot be dropped from the model exactly.
        """
        return drop_experts(model, self.kept)

    def savings(self, model: nn.Module) -> Savings:
        """Counted on the model without the experts."""
        dense = describe(model)
        with self.apply(model):
            small = describe(model)
        return Savings(
            (dense.n_parameters, small.n_parameters),
            _bytes(dense.bytes_per_parameter, dense.n_parameters, small.n_parameters),
            (dense.routed_flops_per_token(), small.routed_flops_per_token()),
        )

    def save(self, model: nn.Module, folder: Path | str, **options: Any) -> Path:
        """As `save_dropped`: an ordinary checkpoint, if all layers keep equally many.

        Raises:
            SpecError: layers keep different numbers of experts, which no checkpoint
                can express yet; or the folder is not empty.
        """
        facts = _facts(self.made, options)
        return save_dropped(self.materialise(model), folder, facts=facts, **options)


def _facts(made: Made, options: dict[str, Any]) -> dict[str, Any]:
    """The facts among `options`, taken out of them, and how the model was made."""
    own = {"method": made.method, "compression": made.to_dict()}
    return own | dict(options.pop("facts", None) or {})


def _bytes(size: float, before: int, after: int) -> tuple[int, int]:
    return round(before * size), round(after * size)
