"""D²-MoE: a common base for the experts of a layer, and differences of low rank.

W_e = B + L_e R_e, where every entry of the base B is the mean of the experts' entries,
weighted with their Fisher information times their tokens.

Shapes: E n_experts; a matrix is (out, in).
"""

from collections.abc import Mapping

import torch

from heapr_lab.methods.collectors import Stacks, sum_over_windows
from heapr_lab.methods.composed_experts import Composition
from heapr_lab.methods.composing import dense_experts
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.low_rank import (
    MOMENTS,
    Moments,
    matrices,
    put_factors,
    ranks_of,
    truncated,
)
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.grouped_linear import accumulating_dtype


def squares(layer: ExpertsLayer, up_rows: torch.Tensor, down: torch.Tensor) -> Stacks:
    """The squared gradient of every weight of a layer, (E, out, in) by projection."""
    stacks = layer.apart(up_rows, axis=1) | {"down": down}
    return {n: g.to(accumulating_dtype(g)).square() for n, g in stacks.items()}


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
    """A compression with the same ranks for all differences of a layer."""
    if not request.ratio:
        return request.composed({})
    ranks = {}
    for k, shape in request.shapes.items():
        base = shape.n_matrices * shape.d_inter * shape.d_expert
        ranks[k] = ranks_of(shape, request.ratio, layer=k, shared=base)
    moments = request.measured.collected(MOMENTS, request.progress)
    fisher = request.measured.once(
        "squared gradients",
        lambda: sum_over_windows(
            request.model, request.calibration, squares, request.progress
        ),
    )
    compositions = {
        moe.layer: _composed(
            moe, fisher[moe.layer], moments[moe.layer], ranks[moe.layer]
        )
        for moe in find_experts(request.model)
    }
    return request.composed(compositions)


def _composed(
    layer: ExpertsLayer,
    fisher: Stacks,
    moments: Moments,
    ranks: Mapping[str, int],
) -> Composition:
    """The experts of a layer: a base for each projection, and their differences."""
    experts = dense_experts(layer)
    for name, rank in ranks.items():
        stack = matrices(layer, name)
        base = base_of(stack, fisher[name], moments.tokens).to(stack.dtype)
        apart = truncated(stack.double() - base.double(), rank, moments.of(name))
        put_factors(experts, name, *apart)
        for expert in experts:
            expert[name] = base
    return experts


D2_MOE = ours("d2-moe", _d2_moe, MOMENTS)
