"""MoE-Pruner: single weights by |W| · ‖p · x‖, so Wanda with routing weights.

Shapes: E n_experts, D d_expert, I d_inter.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from heapr_lab.methods.collectors import ROWS_AT_ONCE, activations, stacked
from heapr_lab.methods.composing import Composition, dense_experts
from heapr_lab.methods.compression import ExpertComposition, Savings
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.experts import ExpertsLayer, describe, find_experts
from heapr_lab.refinement.expert_calls import ExpertCalls


@dataclass(frozen=True, eq=False, repr=False)
class SparseWeights(ExpertComposition):
    """Single weights are 0; shapes, and so files, are those of the dense model."""

    @property
    def n_zeros(self) -> int:
        """Entries of the experts' matrices that are 0."""
        return sum(
            int((tensor == 0).sum())
            for composition in self.compositions.values()
            for expert in composition
            for tensor in expert.values()
            if tensor.dim() == 2
        )

    @property
    def achieved_ratio(self) -> float:
        """The share of the experts' parameters that is 0."""
        total = sum(s.n_atoms * s.atom_parameters for s in self.shapes.values())
        return self.n_zeros / total

    def savings(self, model: nn.Module) -> Savings:
        """Parameters without the zeros; bytes of the files, which hold them.

        Operations are those of the dense model, too.
        """
        dense = describe(model)
        size = round(dense.n_parameters * dense.bytes_per_parameter)
        flops = dense.routed_flops_per_token(None, self.made.tokens)
        after = dense.n_parameters - self.n_zeros
        return Savings((dense.n_parameters, after), (size, size), (flops, flops))


def _squares(calls: ExpertCalls, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of one expert over the tokens routed to it: (D,) and (I,)."""
    sizes = calls.layer.d_expert, calls.layer.d_inter
    of_x, of_h = (torch.zeros(size, dtype=torch.float64) for size in sizes)
    parts = (tensor.split(ROWS_AT_ONCE) for tensor in calls.routed(expert))
    for x, p in zip(*parts, strict=True):
        weight = p.double().square()
        h = activations(calls.layer, expert, x)
        of_x += (weight @ x.double().square()).cpu()
        of_h += (weight @ h.double().square()).cpu()
    return of_x, of_h


WEIGHTED_INPUTS = stacked(_squares, lambda *sums: sums)
"""Σ (p · x)² (E, D) and Σ (p · h)² (E, I) of each layer, in float64."""


def removed(scores: torch.Tensor, ratio: Fraction) -> torch.Tensor:
    """Which weights go: the lowest of each row.

    Shapes: scores (out, in); result bool (out, in).
    """
    order = scores.argsort(dim=1, stable=True)[:, : int(ratio * scores.shape[1])]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)


def _sparse(
    layer: ExpertsLayer, squares: tuple[torch.Tensor, torch.Tensor], request: Request
) -> Composition:
    """The layer's experts without the weights of the lowest scores."""
    sums = {"gate": squares[0], "up": squares[0], "down": squares[1]}
    experts = dense_experts(layer)
    for e, expert in enumerate(experts):
        for name in sums.keys() & expert:
            row, weight = sums[name][e].to(layer.device), expert[name]
            norms = row.sqrt() if row.any() else torch.ones_like(row)
            scores = weight.double().abs() * norms
            expert[name] = weight.masked_fill(removed(scores, request.ratio), 0.0)
    return experts


def _moe_pruner(request: Request) -> SparseWeights:
    """The weights of the lowest scores of each row are 0."""
    compositions = {}
    if request.ratio:
        squares = request.measured.collected(WEIGHTED_INPUTS, request.progress)
        for layer in find_experts(request.model):
            compositions[layer.layer] = _sparse(layer, squares[layer.layer], request)
    return SparseWeights(request.made, compositions, request.shapes)


ours("moe-pruner", _moe_pruner, WEIGHTED_INPUTS)
