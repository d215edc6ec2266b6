"""Experts made of matrices that several of them may share.

Each projection of an expert e is W_e = A_e + L_e R_e: a dense matrix, and a product of
two factors, any of which may be absent, or be that of other experts, too. So one module
runs merged experts (A shared by a group), experts of low rank (L_e R_e alone), a common
base with differences of low rank (A shared by all), and constants (an output bias
alone).

Shapes: E n_experts, D d_expert, I atoms of an expert.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from heapr_lab.models.ragged_experts import (
    activate,
    normalises,
    routed_sum,
    without_weights,
)

PARTS = ("dense", "left", "right", "bias")
ABSENT = -1

# --- what an experts module is made of --------------------------------------------


@dataclass(frozen=True, eq=False)
class Shared:
    """Tensors, and which of them each expert uses."""

    tensors: tuple[torch.Tensor, ...] = ()
    of: tuple[int, ...] = ()
    """For each expert the index of its tensor, or -1; empty if no expert has one."""

    @classmethod
    def own(cls, tensors: Sequence[torch.Tensor]) -> "Shared":
        """Each expert has its own tensor."""
        return cls(tuple(tensors), tuple(range(len(tensors))))

    @property
    def layout(self) -> "Layout":
        """The shapes, without the values."""
        return Layout(tuple(tuple(tensor.shape) for tensor in self.tensors), self.of)


@dataclass(frozen=True)
class Layout:
    """Shapes of tensors, and which of them each expert uses."""

    shapes: tuple[tuple[int, ...], ...] = ()
    of: tuple[int, ...] = ()

    def shape_of(self, expert: int) -> tuple[int, ...] | None:
        """The shape of an expert's tensor; None if it has none."""
        if not self.of or self.of[expert] == ABSENT:
            return None
        return self.shapes[self.of[expert]]


@dataclass(frozen=True, eq=False)
class Projection:
    """One projection of all experts of a layer: W_e = dense + left · right."""

    dense: Shared = field(default_factory=Shared)
    """(out, in) each."""
    left: Shared = field(default_factory=Shared)
    """(out, rank) each; the rank may differ."""
    right: Shared = field(default_factory=Shared)
    """(rank, in) each."""
    bias: Shared = field(default_factory=Shared)
    """(out,) each."""


@dataclass(frozen=True, eq=False)
class Composition:
    """The experts of one layer, without their activation, which stays the family's."""

    up: Projection
    """W_up (I, D)."""
    down: Projection
    """W_down (D, I)."""
    gate: Projection | None = None
    """W_gate (I, D), in families with a gate."""

    @property
    def projections(self) -> dict[str, Projection]:
        """The projections by name: `gate` where there is one, `up` and `down`."""
        gate = {} if self.gate is None else {"gate": self.gate}
        return gate | {"up": self.up, "down": self.down}

    @property
    def plan(self) -> "Plan":
        """The layouts of all parts."""
        return {
            name: {part: getattr(projection, part).layout for part in PARTS}
            for name, projection in self.projections.items()
        }


Plan = Mapping[str, Mapping[str, Layout]]
"""The layout of the tensors of each projection and part."""


def n_parameters(plan: Plan) -> int:
    """Numbers stored for the experts of a layer."""
    return sum(
        math.prod(shape)
        for parts in plan.values()
        for layout in parts.values()
        for shape in layout.shapes
    )


def flops_of(plan: Plan, expert: int) -> int:
    """Operations of an expert for one token: 2 for each entry of its matrices."""
    shapes = [
        layout.shape_of(expert)
        for parts in plan.values()
        for part, layout in parts.items()
        if part != "bias"
    ]
    return sum(2 * math.prod(shape) for shape in shapes if shape is not None)


# --- the module -------------------------------------------------------------------


class ComposedProjection(nn.Module):
    """One projection of all experts of a layer, from the parts of a plan."""

    def __init__(self, parts: Mapping[str, Layout], like: torch.Tensor) -> None:
        """Allocate tensors of the type and device of `like`, without values."""
        super().__init__()
        self.of = {part: layout.of for part, layout in parts.items()}
        for part, layout in parts.items():
            tensors = [nn.Parameter(like.new_empty(shape)) for shape in layout.shapes]
            setattr(self, part, nn.ParameterList(tensors))

    def part(self, part: str, expert: int) -> torch.Tensor | None:
        """A tensor of an expert; None if it has none."""
        indices = self.of[part]
        if not indices or indices[expert] == ABSENT:
            return None
        tensor: torch.Tensor = getattr(self, part)[indices[expert]]
        return tensor

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor | None:
        """The projection of x (n, in), (n, out); None for an expert without parts."""
        dense, left, right, bias = (self.part(part, expert) for part in PARTS)
        out = None if dense is None else F.linear(x, dense)
        if left is not None:
            assert right is not None
            low = F.linear(F.linear(x, right), left)
            out = low if out is None else out + low
        if bias is None:
            return out
        return bias.expand(len(x), -1) if out is None else out + bias


class ComposedExperts(nn.Module):
    """The experts of one layer, made of shared matrices.

    Replaces the family's own experts module, with the same arguments.
    """

    family: Any
    """The family's own module without weights: activation, gating and norm."""
    heapr_composed = True
    """The mark by which other code knows them."""

    def __init__(self, module: Any, plan: Plan) -> None:
        """Allocate the tensors of `plan` in place of the weights of `module`."""
        super().__init__()
        like = module.down_proj
        self.plan, self.n_experts = plan, len(like)
        # Not a submodule, so that its own submodules keep their names.
        self.__dict__["family"] = without_weights(module)
        for name, child in self.family.named_children():
            self.add_module(name, child)
        for name, parts in plan.items():
            self.add_module(f"composed_{name}", ComposedProjection(parts, like))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The routed experts' weighted sum.

        Shapes: hidden_states (T, D); top_k_index, top_k_weights (T, K); result (T, D).
        """
        return routed_sum(
            self._expert, self.n_experts, hidden_states, top_k_index, top_k_weights
        )

    def _expert(self, expert: int, x: torch.Tensor) -> Any:
        rows = self._projected("up", x, expert)
        if rows is not None and self.family.has_gate:
            rows = _fused(self.family, self._projected("gate", x, expert), rows)
        h = x[:, :0] if rows is None else activate(self.family, rows)
        out = self._projected("down", h, expert)
        if out is None:
            out = torch.zeros_like(x)
        return self.family.post_expert_norm(out) if normalises(self.family) else out

    def _projected(self, name: str, x: torch.Tensor, expert: int) -> Any:
        return self.get_submodule(f"composed_{name}")(x, expert)

    @torch.no_grad()
    def fill(self, composition: Composition) -> "ComposedExperts":
        """Copy the values of `composition`, of the same plan; returns itself."""
        for name, source in composition.projections.items():
            target = self.get_submodule(f"composed_{name}")
            for part in PARTS:
                pairs = zip(
                    getattr(target, part), getattr(source, part).tensors, strict=True
                )
                for parameter, value in pairs:
                    parameter.copy_(value)
        return self


def _fused(family: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Both projections in the family's own order, (n, 2I)."""
    if family.is_concatenated:
        return torch.cat([gate, up], dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)
