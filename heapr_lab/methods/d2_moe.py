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
from heapr_lab.methods.method import Method, Request
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


D2_MOE = Method(
    "d2-moe",
    "D²-MoE: a Fisher-weighted base, and differences of low rank",
    "Gu et al. 2025, D²-MoE, arXiv:2502.17298",
    "low rank",
    _d2_moe,
    deviations=(
        "The base keeps all of its columns, so that all of the ratio comes from the "
        "ranks of the differences; the authors remove a fifth of them, a part chosen "
        "anew for each batch of inputs.",
        "Ranks fit the parameters that are left, with the base counted.",
        "The Fisher information is the mean over windows of the squared gradient of a "
        "window's loss, for every entry. The authors' code shifts the labels for a "
        "model that shifts them itself: its loss is that of the token after the next.",
        "Frequencies and moments come from the same windows; the authors use a set of "
        "its own for each.",
        "An expert that no calibration token reaches has no weight in the base, and "
        "its difference is decomposed without whitening.",
    ),
    collectors=(MOMENTS,),
)
