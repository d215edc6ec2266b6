"""Experts of different widths on grouped matrix products, for inference.

An expert is the sum of its atoms, so that the atoms of all experts can be cut into
levels: with experts ordered by decreasing width, level j has the atoms b_j to b_{j+1}
of all experts wider than b_j, padded with zeros to b_{j+1} - b_j. A level is a stack of
matrices of one shape, and the tokens of its experts, which are the first in the order,
are a range of rows: one grouped product, whose offsets stay on the device. Nothing
waits for the device, so that it can be compiled and captured in a CUDA graph.

Shapes: E n_experts, D d_expert, T tokens, K top_k, R = T · K routed rows, c width of a
level, f rows of the input projection for an atom (2 with a gate, else 1).
"""

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.experts import sliced_experts, trainable_experts
from heapr_lab.models.ragged_experts import RaggedExperts, activate, normalises
from heapr_lab.models.streamed import refuse_streamed

MULTIPLE = 16
"""Of which the widths of levels are multiples: the kernels' alignment in bytes."""
LEVEL_COST = 32
"""Atoms of all experts whose products take as long as a level's sum of outputs."""


def levels_of(widths: Sequence[int]) -> list[int]:
    """The bounds of levels with the least padding, 0 and the greatest width included.

    The padded atoms of all levels are weighed against `LEVEL_COST` for each level.

    Args:
        widths: atoms of each expert.

    Example:
        >>> levels_of([256, 256, 64, 64])
        [0, 64, 256]
    """
    bounds = [0, *sorted({-(-w // MULTIPLE) * MULTIPLE for w in widths if w})]
    wider = [sum(w > bound for w in widths) for bound in bounds]
    best: list[tuple[int, list[int]]] = [(0, [0])]
    for end in range(1, len(bounds)):
        best.append(
            min(
                (
                    cost
                    + wider[start] * (bounds[end] - bounds[start])
                    + LEVEL_COST * len(widths),
                    [*cuts, bounds[end]],
                )
                for start, (cost, cuts) in enumerate(best)
            )
        )
    return best[-1][1]


class Level(nn.Module):
    """Atoms of the widest experts, in matrices of one shape."""

    up: torch.Tensor
    """(E_j, D, f · c)."""
    down: torch.Tensor
    """(E_j, c, D)."""
    bias: torch.Tensor | None
    """(E_j, f · c)."""

    def __init__(self, own: RaggedExperts, order: list[int], atoms: range) -> None:
        """Of `own`, the `atoms` of the experts in `order` that have any of them."""
        super().__init__()
        wide = [e for e in order if own.heapr_widths[e] > atoms.start]
        stacks = [_padded(own, expert, atoms) for expert in wide]
        names = ("up", "down", "bias")
        for name, parts in zip(names, zip(*stacks, strict=True), strict=True):
            made = None if parts[0] is None else torch.stack(parts)
            if made is not None and name == "up":
                made = made.transpose(1, 2)
            self.register_buffer(name, made, persistent=False)

    def forward(
        self, family: Any, x: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """What the atoms add to the outputs of the rows of their experts, else 0.

        Shapes: x (R, D), sorted by expert; experts (R,), their places in the order;
        ends (E,), the number of rows up to and with those of each expert.
        """
        n_experts = len(self.up)
        offsets = ends[:n_experts]
        h: torch.Tensor = F.grouped_mm(x, self.up, offs=offsets)
        if self.bias is not None:
            h = h + self.bias[experts.clamp(max=n_experts - 1)]
        out = F.grouped_mm(activate(family, h), self.down, offs=offsets)
        # Rows after the last group are not computed: they may be anything.
        added: torch.Tensor = out.where((experts < n_experts)[:, None], 0)
        return added


def _padded(
    own: RaggedExperts, expert: int, atoms: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows (f · c, D), columns (c, D) and bias (f · c,) of the `atoms` of an expert."""
    rows, columns = own._rows_of(expert), own._atoms_of(expert)
    parts = 1 if not own.family.is_concatenated else own.factor

    def cut(tensor: torch.Tensor, parts: int, factor: int) -> torch.Tensor:
        found = []
        for part in tensor.chunk(parts) if len(tensor) else [tensor] * parts:
            kept = part[factor * atoms.start : factor * atoms.stop]
            lacking = factor * len(atoms) - len(kept)
            found.append(torch.cat([kept, kept.new_zeros(lacking, *kept.shape[1:])]))
        return torch.cat(found)

    factor = own.factor // parts
    bias = None if own.up_bias is None else cut(own.up_bias[rows], parts, factor)
    up = cut(own.up_rows[rows], parts, factor)
    return up, cut(own.down_columns[columns], 1, 1), bias


class GroupedExperts(nn.Module):
    """The experts of one layer in levels; replaces `RaggedExperts` for inference."""

    family: Any
    """The family's own module without weights, as of `RaggedExperts`."""
    place: torch.Tensor
    """Of each expert in the order, and E for no expert: (E + 1,)."""
    down_bias: torch.Tensor | None
    """(E, D), in the order."""

    def __init__(self, own: RaggedExperts) -> None:
        """Of the experts `own`, whose weights are copied."""
        super().__init__()
        widths = own.heapr_widths
        order = sorted(range(len(widths)), key=lambda e: -widths[e])
        bounds = levels_of(widths)
        self.levels = nn.ModuleList(
            Level(own, order, range(start, end))
            for start, end in itertools.pairwise(bounds)
        )
        self.__dict__["family"] = own.family
        for name, child in own.family.named_children():
            self.add_module(name, child)
        device = own.up_rows.device
        place = torch.tensor([*order, len(order)], device=device).argsort()
        self.register_buffer("place", place, persistent=False)
        biases = None if own.down_bias is None else own.down_bias.detach()[order]
        self.register_buffer("down_bias", biases, persistent=False)

    @torch.no_grad()
    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The routed experts' weighted sum, as of `RaggedExperts`.

        Shapes: hidden_states (T, D); top_k_index, top_k_weights (T, K); result (T, D).
        """
        n_experts, top_k = len(self.place) - 1, top_k_index.shape[-1]
        experts, order = torch.sort(self.place[top_k_index.reshape(-1)], stable=True)
        x = hidden_states[order // top_k]
        numbers = torch.arange(n_experts, device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).int()
        out = torch.zeros_like(x)
        for level in self.levels:
            out = out + level(self.family, x, experts, ends)
        out = self._finished(out, experts)
        out = out * top_k_weights.reshape(-1)[order][:, None]
        wide = torch.promote_types(out.dtype, torch.float32)
        back = torch.empty_like(out).index_copy_(0, order, out)
        total: torch.Tensor = back.unflatten(0, (-1, top_k)).sum(1, dtype=wide)
        return total.to(hidden_states.dtype)

    def _finished(self, out: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """With output biases and norm; 0 where no expert is asked for."""
        n_experts = len(self.place) - 1
        if self.down_bias is not None:
            out = out + self.down_bias[experts.clamp(max=n_experts - 1)]
        if normalises(self.family):
            out = self.family.post_expert_norm(out)
        return out.where((experts < n_experts)[:, None], 0)


def group_experts(model: Any) -> Any:
    """Let a pruned model run its experts by grouped products, in place, for inference.

    It cannot be trained, pruned or saved any more. Weights are in float32, bfloat16 or
    float16; padding takes some memory (`levels_of`).

    Args:
        model: of `prune`, or a pruned one that was loaded; in memory.

    Returns:
        `model`.

    Raises:
        SpecError: the model has no ragged experts, they are quantised or of another
            dtype, it is streamed, or this torch has no grouped products.
    """
    refuse_streamed(model, remedy="load it with stream=False to arrange its experts")
    experts = trainable_experts(model)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if not experts or model.dtype not in dtypes or not hasattr(F, "grouped_mm"):
        raise SpecError(
            f"this {type(model).__name__} has {len(experts)} layers of ragged experts "
            f"in {model.dtype}: expected a pruned model in float32, bfloat16 or "
            "float16, and torch from 2.10 on"
        )
    for name, module in sliced_experts(model).items():
        parent, _, own = name.rpartition(".")
        with torch.no_grad():
            setattr(model.get_submodule(parent), own, GroupedExperts(module))
    model.__dict__.pop("heapr_keep", None)
    model.__dict__["save_pretrained"] = _refuse
    return model


def _refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Instead of writing a model without its experts.

    Raises:
        SpecError: always.
    """
    raise SpecError(
        "the experts of this model are arranged for inference: save it before "
        "group_experts"
    )
