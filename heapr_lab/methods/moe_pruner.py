"""MoE-Pruner: single weights by |W| · ‖p · x‖, so Wanda with routing weights.

Shapes: E n_experts, D d_expert, I d_inter.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.methods import OPTIONS
from heapr_lab.methods.collectors import ROWS_AT_ONCE, Collector, activations
from heapr_lab.methods.composed_experts import Composition, Projection, Shared
from heapr_lab.methods.composing import composition_of
from heapr_lab.methods.compression import ExpertComposition, Savings
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.experts import ExpertsLayer, describe, find_experts
from heapr_lab.refinement.expert_calls import ExpertCalls

PATTERNS = {"unstructured": None, "2:4": (2, 4), "4:8": (4, 8)}
"""How many weights are kept of how many consecutive ones of a row."""


@dataclass(frozen=True, eq=False, repr=False)
class SparseWeights(ExpertComposition):
    """Single weights are 0; the shapes, and so the files, are those of the dense model.

    In 2:4, a packed format would hold half of the values and 2 bits for the place of
    each: 9/16 of the bytes of 16-bit weights; in 4:8, with 3 bits, 19/32.
    """

    @property
    def n_zeros(self) -> int:
        """Entries of the experts' matrices that are 0."""
        return sum(
            int((tensor == 0).sum())
            for composition in self.compositions.values()
            for projection in composition.projections.values()
            for tensor in projection.dense.tensors
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


def _squares_of_layer(
    _model: nn.Module, layer: ExpertsLayer, calls: ExpertCalls
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ (p · x)² (E, D) and Σ (p · h)² (E, I)."""
    rows = [_squares(layer, calls, expert) for expert in range(layer.n_experts)]
    x, h = (torch.stack(column) for column in zip(*rows, strict=True))
    return x, h


def _squares(
    layer: ExpertsLayer, calls: ExpertCalls, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of one expert over the tokens routed to it: (D,) and (I,)."""
    sizes = layer.d_expert, layer.d_inter
    of_x, of_h = (torch.zeros(size, dtype=torch.float64) for size in sizes)
    parts = (tensor.split(ROWS_AT_ONCE) for tensor in calls.routed(expert))
    for x, p in zip(*parts, strict=True):
        weight = p.double().square()
        h = activations(layer, expert, x)
        of_x += (weight @ x.double().square()).cpu()
        of_h += (weight @ h.double().square()).cpu()
    return of_x, of_h


WEIGHTED_INPUTS = Collector("weighted inputs", _squares_of_layer)
"""Σ (p · x)² (E, D) and Σ (p · h)² (E, I) of each layer, in float64."""


def removed(
    scores: torch.Tensor, ratio: Fraction, pattern: tuple[int, int] | None
) -> torch.Tensor:
    """Which weights go: the lowest of each row, or of each group of a row.

    Shapes: scores (out, in); result bool (out, in).

    Raises:
        SpecError: rows cannot be divided into the groups of the pattern.
    """
    kept, group = pattern or (0, scores.shape[1])
    if scores.shape[1] % group:
        raise SpecError(
            f"pattern {kept}:{group} needs rows of a multiple of {group} weights, "
            f"found {scores.shape[1]}: use pattern=unstructured"
        )
    number = group - kept if pattern else int(ratio * group)
    groups = scores.unflatten(1, (-1, group))
    order = groups.argsort(dim=-1, stable=True)[..., :number]
    return (
        torch.zeros_like(groups, dtype=torch.bool).scatter(-1, order, True).flatten(1)
    )


def _sparse(
    layer: ExpertsLayer, squares: tuple[torch.Tensor, torch.Tensor], request: Request
) -> Composition:
    """The layer's experts without the weights of the lowest scores."""
    dense, pattern = composition_of(layer), PATTERNS[request.options["pattern"]]

    def tensors(part: Shared, sums: torch.Tensor) -> Iterator[torch.Tensor]:
        for weight, row in zip(part.tensors, sums.to(layer.device), strict=True):
            norms = row.sqrt() if row.any() else torch.ones_like(row)
            scores = weight.double().abs() * norms
            yield weight.masked_fill(removed(scores, request.ratio, pattern), 0.0)

    def projection(p: Projection, sums: torch.Tensor) -> Projection:
        return replace(p, dense=Shared.own([*tensors(p.dense, sums)]))

    sums = {"gate": squares[0], "up": squares[0], "down": squares[1]}
    parts = dense.projections.items()
    return Composition(**{name: projection(p, sums[name]) for name, p in parts})


def _moe_pruner(request: Request) -> SparseWeights:
    """The weights of the lowest scores of each row are 0.

    Raises:
        SpecError: there is no such pattern, or it removes another share.
    """
    pattern, shapes = request.choice("pattern", PATTERNS), request.shapes
    if not request.ratio:
        return SparseWeights(request.made, {}, shapes)
    if PATTERNS[pattern] and request.ratio != Fraction(1, 2):
        raise SpecError(
            f"pattern {pattern} removes half of the weights, but ratio is "
            f"{float(request.ratio):g}: give ratio 0.5 or pattern=unstructured"
        )
    squares = request.measured.collected(WEIGHTED_INPUTS, request.progress)
    compositions = {
        layer.layer: _sparse(layer, squares[layer.layer], request)
        for layer in find_experts(request.model)
    }
    return SparseWeights(request.made, compositions, shapes)


MOE_PRUNER = Method(
    "moe-pruner",
    "MoE-Pruner: single weights by |W| times the norm of their routed inputs",
    "Xie et al. 2024, MoE-Pruner, arXiv:2410.12013",
    "weights",
    _moe_pruner,
    deviations=(
        "Only routed experts are pruned, and the ratio is that of their parameters; "
        "biases are kept.",
        "Every layer is measured on the dense model, not on pruned layers before it.",
        "Nothing is distilled afterwards.",
        "⌊ratio · n⌋ of the n weights of each row go; those of an expert that no "
        "calibration token reaches go by |W| alone.",
        "Bytes are those of dense files: a packed format, which is not written, would "
        "take 9/16 of 16-bit weights for 2:4, and 19/32 for 4:8.",
    ),
    options=OPTIONS["moe-pruner"],
    collectors=(WEIGHTED_INPUTS,),
)
