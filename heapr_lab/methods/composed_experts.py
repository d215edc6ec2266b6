"""Experts made of matrices that several of them may share.

Each projection of an expert e is W_e = A_e + L_e R_e: a dense matrix, and a product of
two factors, any of which may be absent, or be that of other experts, too. So one module
runs merged experts (A shared by a group), experts of low rank (L_e R_e alone), a common
base with differences of low rank (A shared by all), and constants (an output bias
alone).

Shapes: E n_experts, D d_expert, I atoms of an expert.
"""

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
_Layout = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]

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

    @classmethod
    def some(cls, tensors: Mapping[int, torch.Tensor], n_experts: int) -> "Shared":
        """Some experts have a tensor; one that several of them have is stored once."""
        distinct = {id(tensor): tensor for tensor in tensors.values()}
        numbers = {e: [*distinct].index(id(tensor)) for e, tensor in tensors.items()}
        of = tuple(numbers.get(e, ABSENT) for e in range(n_experts))
        return cls(tuple(distinct.values()), of if distinct else ())

    @property
    def layout(self) -> _Layout:
        """The shapes, and which of them each expert uses, without the values."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors), self.of

    def tensor_of(self, expert: int) -> torch.Tensor | None:
        """The tensor of an expert; None if it has none."""
        place = self.of[expert] if self.of else ABSENT
        return None if place == ABSENT else self.tensors[place]


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

    @property
    def parts(self) -> dict[str, Shared]:
        """The parts by name."""
        return {name: getattr(self, name) for name in PARTS}


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
    def parts(self) -> dict[tuple[str, str], Shared]:
        """The parts of all projections, by the names of projection and part."""
        return {
            (name, part): shared
            for name, projection in self.projections.items()
            for part, shared in projection.parts.items()
        }

    @property
    def plan(self) -> dict[tuple[str, str], _Layout]:
        """The layouts of all parts."""
        return {names: shared.layout for names, shared in self.parts.items()}

    @property
    def n_parameters(self) -> int:
        """Numbers stored for the experts of a layer."""
        return sum(t.numel() for part in self.parts.values() for t in part.tensors)

    def flops_of(self, expert: int) -> int:
        """Operations of an expert for one token: 2 for each entry of its matrices."""
        tensors = [part.tensor_of(expert) for part in self.parts.values()]
        return sum(2 * t.numel() for t in tensors if t is not None and t.dim() == 2)


# --- the module -------------------------------------------------------------------


class ComposedProjection(nn.Module):
    """One projection of all experts of a layer."""

    @torch.no_grad()
    def __init__(self, projection: Projection, like: torch.Tensor) -> None:
        """Copy all tensors, in the type and on the device of `like`."""
        super().__init__()
        self.of = {name: part.of for name, part in projection.parts.items()}
        for name, part in projection.parts.items():
            tensors = [like.new_empty(t.shape).copy_(t) for t in part.tensors]
            setattr(self, name, nn.ParameterList(map(nn.Parameter, tensors)))

    def part(self, name: str, expert: int) -> torch.Tensor | None:
        """A tensor of an expert; None if it has none."""
        return Shared(getattr(self, name), self.of[name]).tensor_of(expert)

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

    def __init__(self, module: Any, composition: Composition) -> None:
        """Copy the tensors of `composition` in place of the weights of `module`."""
        super().__init__()
        like = module.down_proj
        self.n_experts = len(like)
        # Not a submodule, so that its own submodules keep their names.
        self.__dict__["family"] = without_weights(module)
        for name, child in self.family.named_children():
            self.add_module(name, child)
        for name, projection in composition.projections.items():
            self.add_module(f"composed_{name}", ComposedProjection(projection, like))

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


def _fused(family: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Both projections in the family's own order, (n, 2I)."""
    if family.is_concatenated:
        return torch.cat([gate, up], dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)
