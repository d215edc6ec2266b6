"""D²-MoE: a common base for the experts of a layer, and differences of low rank.

W_e = B + L_e R_e, where every entry of the base B is the mean of the experts' entries,
weighted with their Fisher information times their tokens.

Shapes: E n_experts; a matrix is (out, in).
"""

from collections.abc import Mapping

import torch

from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.gradients import WeightGradients, visit_gradients
from heapr_lab.methods.low_rank import (
    MOMENTS,
    Moments,
    composition,
    compression_of,
    factored,
    matrices,
    ranks_of,
    refuse_unmade,
    truncated,
)
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.composed_experts import Composition, Projection, Shared
from heapr_lab.models.experts import ExpertsLayer, find_experts

Stacks = dict[str, torch.Tensor]
"""A value of every weight of a layer by projection, (E, out, in) each."""


def squared_gradients(request: Request) -> dict[int, Stacks]:
    """The sum over windows of the squared gradient of a window's loss, by layer."""
    sums: dict[int, Stacks] = {}

    def add(found: WeightGradients) -> None:
        own = found.layer.apart(found.up_rows, axis=1) | {"down": found.down}
        squares = {name: g.to(_wide(g)).square() for name, g in own.items()}
        before = sums.get(found.layer.layer, dict.fromkeys(squares, 0))
        sums[found.layer.layer] = {k: before[k] + new for k, new in squares.items()}

    calibration = request.calibration
    visit_gradients(request.model, calibration, add, progress=request.progress)
    return sums


def _wide(gradient: torch.Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


def base_of(
    stack: torch.Tensor, fisher: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Σ F_e f_e W_e / Σ F_e f_e of each entry, in float64; the mean where that is 0/0.

    Shapes: stack, fisher (E, out, in); tokens (E,); result (out, in).
    """
    wide = stack.double()
    weights = fisher.double() * tokens.to(stack.device)[:, None, None]
    total = weights.sum(0)
    weighted = (weights * wide).sum(0) / torch.where(total > 0, total, 1)
    return torch.where(total > 0, weighted, wide.mean(0))


def _d2_moe(request: Request) -> ExpertComposition:
    """The same ranks for all differences of a layer."""
    refuse_unmade(request)
    if not request.ratio:
        return compression_of(request)
    shapes = request.measured.architecture.layers
    ranks = {
        k: ranks_of(own, request.ratio, layer=k, shared=_base_numbers(own))
        for k, own in shapes.items()
    }
    moments = request.measured.collected(MOMENTS, request.progress)
    fisher = request.measured.once(
        "squared gradients", lambda: squared_gradients(request)
    )
    made = {
        own.layer: _composed(
            own, fisher[own.layer], moments[own.layer], ranks[own.layer]
        )
        for own in find_experts(request.model)
    }
    return compression_of(request, made)


def _base_numbers(shape: LayerShape) -> int:
    """The size of the base of a layer."""
    return shape.n_matrices * shape.d_inter * shape.d_expert


def _composed(
    layer: ExpertsLayer,
    fisher: Stacks,
    moments: Moments,
    ranks: Mapping[str, int],
) -> Composition:
    """The experts of a layer: a base for each projection, and their differences."""
    made = {}
    for name, rank in ranks.items():
        stack = matrices(layer, name)
        base = base_of(stack, fisher[name], moments.tokens).to(stack.dtype)
        apart = truncated(stack.double() - base.double(), rank, moments.of(name))
        own = factored(layer, apart)
        dense = Shared((base,), (0,) * layer.n_experts)
        made[name] = Projection(dense, own.left, own.right)
    return composition(layer, made)


D2_MOE = Method(
    "d2-moe",
    "D²-MoE: a Fisher-weighted base, and differences of low rank",
    "Gu et al. 2025, D²-MoE, arXiv:2502.17298",
    "low rank",
    _d2_moe,
    deviations=(
        "The base is kept whole: the authors' semi-dynamic pruning of its columns, "
        "which depends on the input, is not included, so that all of the ratio comes "
        "from the ranks of the differences.",
        "Ranks fit the parameters that are left, with the base counted.",
        "The Fisher information is the mean over windows of the squared gradient of a "
        "window's loss, for every entry.",
        "Frequencies and moments come from the same windows; the authors use a set of "
        "its own for each.",
        "An expert that no calibration token reaches has no weight in the base, and "
        "its difference is decomposed without whitening.",
    ),
    collectors=(MOMENTS,),
)
