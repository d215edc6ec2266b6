"""What a method found: how a model is compressed, and what that saves."""

import abc
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from heapr_lab.methods.composing import (
    Compositions,
    composed,
    composing,
    distinct,
    flops_of,
    renumber,
)
from heapr_lab.methods.expert_axes import KeptExperts
from heapr_lab.models.architecture import Architecture, LayerShape, expert_shares
from heapr_lab.models.experts import describe
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import ReplacedDownProj, masking, prune


@dataclass(frozen=True, eq=False)
class Made:
    """The method and the settings with which a compression was made."""

    method: str
    """Its name."""
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
    """Parameters of the whole model, before and after."""
    bytes: tuple[int, int]
    """Bytes of these parameters, in the dtype in which the model is loaded."""
    routed_flops: tuple[float, float]
    """Operations of the routed experts for a mean token. With fewer experts a token is
    still routed to as many of them: only smaller experts change it."""


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

    def __repr__(self) -> str:
        made = self.made
        options = ", ".join(f"{name}={value}" for name, value in made.options.items())
        return (
            f"{type(self).__name__}(method {made.method}, ratio, asked for "
            f"{made.ratio:.4g}, ratio, achieved {self.achieved_ratio:.4g}, options "
            f"{options or 'none'}, seed {made.seed})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class AtomCompression(Compression):
    """Atoms are removed; W_down of the others may be replaced."""

    made: Made
    keep: KeepMask
    atom_parameters: Mapping[int, int]
    """Parameters of one atom, by layer."""
    down_projs: ReplacedDownProj | None = None
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
        """A context like `masking`: only this thread's forwards change.

        Raises:
            SpecError: it was fitted to another model.
        """
        return masking(model, self.keep, self.down_projs)

    def materialise(self, model: nn.Module) -> nn.Module:
        """The copy that `prune` makes.

        Raises:
            SpecError: it was fitted to another model.
        """
        return prune(model, self.keep, down_projs=self.down_projs)

    def savings(self, model: nn.Module) -> Savings:
        """Sizes, counted with the calibration text's routing, if it was measured."""
        dense, tokens = describe(model), self.made.tokens
        flops = [dense.routed_flops_per_token(k, tokens) for k in (None, self.keep)]
        return _savings(dense, dense.parameters(self.keep), *flops)


@dataclass(frozen=True, eq=False, repr=False)
class ExpertComposition(Compression):
    """Fewer experts are left, or they have other weights, which they may share."""

    made: Made
    compositions: Compositions
    """New experts by layer, in place of its own; other layers are unchanged."""
    shapes: Mapping[int, LayerShape]
    """The sizes of the dense model's layers."""
    kept: KeptExperts | None = None
    """By layer, the experts that are left, in the order of its composition; None if all
    are, with the whole router."""

    def apply(self, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """A context like `composing`: `model` changes in all threads until it ends.

        Raises:
            SpecError: it was fitted to another model, a mask is active, or another
                thread is in such a context.
            LayoutError: the experts cannot be replaced exactly.
        """
        return composing(model, self.compositions, self.kept)

    def materialise(self, model: nn.Module) -> nn.Module:
        """A copy, with the number of its experts in its configuration if that can be.

        Otherwise its `save_pretrained` refuses.

        Raises:
            SpecError: as `apply`.
            LayoutError: as `apply`.
        """
        small = composed(model, self.compositions, self.kept)
        renumber(small, like=model)
        return small

    @property
    def achieved_ratio(self) -> float:
        """The share of the experts' parameters that is removed.

        A matrix that experts share is counted once.
        """
        total = sum(s.n_atoms * s.atom_parameters for s in self.shapes.values())
        left = sum(self._stored(layer) for layer in self.shapes)
        return 1 - left / total

    def _stored(self, layer: int) -> int:
        """Numbers stored for the atoms of a layer, without output biases."""
        if layer in self.compositions:
            every = distinct(self.compositions[layer]).values()
            return sum(t.numel() for name, t in every if name != "down_bias")
        shape = self.shapes[layer]
        n_experts = shape.n_experts if self.kept is None else len(self.kept[layer])
        return n_experts * shape.d_inter * shape.atom_parameters

    def savings(self, model: nn.Module) -> Savings:
        """Sizes, counted on the model with the other experts.

        Operations of experts that are left when others are dropped are for equal
        shares of the tokens.
        """
        dense = describe(model)
        tokens = None if self.kept is not None else self.made.tokens
        with self.apply(model):
            after = sum(parameter.numel() for parameter in model.parameters())
        before = dense.routed_flops_per_token(None, tokens)
        return _savings(dense, after, before, self._routed_flops(tokens))

    def _routed_flops(self, tokens: pd.DataFrame | None) -> float:
        """Operations of the routed experts for a mean token."""
        shares, total = expert_shares(tokens, self.shapes), 0.0
        for layer, shape in self.shapes.items():
            if layer not in self.compositions:
                total += shape.top_k * shape.d_inter * shape.atom_flops
                continue
            flops = [flops_of(expert) for expert in self.compositions[layer]]
            mean = np.mean(flops) if self.kept is not None else shares[layer] @ flops
            total += shape.top_k * float(mean)
        return total


def _savings(dense: Architecture, after: int, *flops: float) -> Savings:
    """The savings of a model that is left with `after` parameters of the same size."""
    before, size = dense.n_parameters, dense.bytes_per_parameter
    sizes = round(before * size), round(after * size)
    return Savings((before, after), sizes, (flops[0], flops[1]))
