"""MoE-SVD: in the least sensitive layers, experts share a right factor of low rank.

In each projection of such a layer, W_e = U_e V: V is that of the expert to which most
tokens are routed, U_e is fitted to it, and where the budget is small, experts with
fewer tokens take the U of others.

Shapes: E n_experts; a matrix is (out, in), U is (out, rank), V is (rank, in).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch

from heapr_lab.errors import SpecError
from heapr_lab.methods.composed_experts import Composition
from heapr_lab.methods.composing import dense_experts
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.low_rank import (
    MOMENTS,
    Moments,
    damped,
    matrices,
    put_factors,
    truncated,
)
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.experts import ExpertsLayer, find_experts

_PRINCIPAL = 0.01
"""A singular value counts if it is larger than this share of the largest."""
_LEAST_RANK = Fraction(1, 2)
"""Share of the full rank below which experts share a U rather than lower the rank."""

# --- which layers -----------------------------------------------------------------


def sensitivity(layer: ExpertsLayer, moments: Moments) -> float:
    """S_L = Σ_e f_e r_e a_e.

    f is the expert's share of the routed tokens, r the mean over its matrices of the
    number of singular values above 1 % of the largest, a its share of outliers.
    """
    ranks = torch.stack(
        [_principal_ranks(matrices(layer, name)) for name in names_of(layer)]
    )
    shares = moments.tokens / moments.tokens.sum()
    return float((shares * ranks.mean(0).cpu() * moments.outliers).sum())


def names_of(layer: ExpertsLayer) -> tuple[str, ...]:
    """The projections of an expert."""
    return ("gate", "up", "down") if layer.gated else ("up", "down")


def _principal_ranks(stack: torch.Tensor) -> torch.Tensor:
    """The number of large singular values of each matrix, (E,)."""
    values = torch.linalg.svdvals(stack.double())
    large: torch.Tensor = values > _PRINCIPAL * values[:, :1]
    return large.sum(1).double()


def chosen(
    sensitivities: Mapping[int, float],
    shapes: Mapping[int, LayerShape],
    ratio: Fraction,
    most: Fraction,
) -> tuple[list[int], Fraction]:
    """The layers to decompose, the least sensitive first, and the ratio of each.

    As few as can lose `ratio` of all parameters if each loses at most `most` of its
    own; all layers if these are too few.
    """
    sizes = {k: shape.n_atoms * shape.atom_parameters for k, shape in shapes.items()}
    gone, layers, size = ratio * sum(sizes.values()), list[int](), 0
    for layer in sorted(sensitivities, key=lambda k: sensitivities[k]):
        if size * most >= gone:
            break
        layers.append(layer)
        size += sizes[layer]
    return layers, gone / size


# --- how large --------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What one projection of a layer is stored as."""

    decomposed: int
    """The number of experts that share V; the others are dense."""
    lefts: int
    """The number of different U."""
    rank: int

    def numbers(self, n_experts: int, out: int, into: int) -> int:
        """How many numbers that is."""
        dense = (n_experts - self.decomposed) * out * into
        return dense + self.rank * (self.lefts * out + into)


def sizes_of(budget: Fraction, n_experts: int, out: int, into: int) -> Sizes:
    """The sizes that fit `budget` numbers, with at most one rank of it left over.

    All experts are decomposed, but for budgets that the full rank of one V cannot use.
    Each has its own U if the rank is then at least half the full one.
    """
    if budget >= n_experts * out * into:
        return Sizes(0, 0, 0)
    full = min(out, into)
    experts = next(
        e
        for e in range(n_experts, 0, -1)
        if Sizes(e, e, full).numbers(n_experts, out, into) >= budget
    )
    room = budget - (n_experts - experts) * out * into
    if room < out + into and experts < n_experts:
        return Sizes(experts + 1, experts + 1, full)
    lefts = math.floor((room / math.ceil(full * _LEAST_RANK) - into) / out)
    lefts = max(1, min(experts, lefts))
    return Sizes(experts, lefts, min(full, int(room // (lefts * out + into))))


# --- what is stored ---------------------------------------------------------------


def shared_right(
    stack: torch.Tensor, moment: torch.Tensor, sizes: Sizes
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """U and V of experts' matrices: one V, and at most `lefts` different U.

    Args:
        stack: the matrices (n, out, in), of the expert with the most tokens first.
        moment: the moments of their inputs, (n, in, in).
        sizes: of what rank V is, and how many U there are.
    """
    _, rows = truncated(stack[0], sizes.rank, moment[0])
    right = torch.linalg.qr(rows.mT).Q.mT  # of full rank, even if the matrix is not
    lefts, inner = _fitted(stack, moment, right)
    kept = [*lefts[: sizes.lefts].to(stack.dtype)]
    nearest = [kept[place] for place in _nearest(lefts, inner, sizes.lefts)]
    return nearest, [right.to(stack.dtype)] * len(stack)


def _fitted(
    stack: torch.Tensor, moment: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """U of each expert, for which ‖(W − U V) S‖ is least, and V M Vᵀ."""
    second = damped(moment)
    inner = right @ second @ right.mT  # (n, rank, rank)
    outer = stack.double() @ second @ right.mT  # (n, out, rank)
    return torch.linalg.solve(inner, outer, left=False), inner


def _nearest(lefts: torch.Tensor, inner: torch.Tensor, n_kept: int) -> list[int]:
    """For each expert the one of the first U that changes its outputs least."""
    places = list(range(n_kept))
    for left, metric in zip(lefts[n_kept:], inner[n_kept:], strict=True):
        apart = lefts[:n_kept] - left  # (n_kept, out, rank)
        places.append(int(((apart @ metric) * apart).sum((1, 2)).argmin()))
    return places


# --- the method -------------------------------------------------------------------


def _moe_svd(request: Request) -> ExpertComposition:
    """The least sensitive layers decomposed, within one budget."""
    most = _most(request)
    if not request.ratio:
        return request.composed({})
    shapes = request.shapes
    layers = {layer.layer: layer for layer in find_experts(request.model)}
    moments = request.measured.collected(MOMENTS, request.progress)
    scores = {k: sensitivity(layer, moments[k]) for k, layer in layers.items()}
    numbers, ratio = chosen(scores, shapes, request.ratio, most)
    compositions, left = {}, Fraction(0)
    for number in numbers:
        budget = left + _budget(shapes[number], ratio)
        compositions[number], left = _composed(layers[number], moments[number], budget)
    return request.composed(compositions)


def _most(request: Request) -> Fraction:
    """The largest share that one layer loses.

    Raises:
        SpecError: it is not in (0, 1].
    """
    most = request.options["most_of_layer"]
    if not 0 < most <= 1:
        raise SpecError(f"most_of_layer is {most!r}, expected a share in (0, 1]")
    return Fraction(str(most))


def _budget(shape: LayerShape, ratio: Fraction) -> Fraction:
    """Numbers left for the matrices of a layer; biases are kept."""
    weights = (1 - ratio) * shape.atom_parameters - shape.atom_biases
    return shape.n_atoms * weights


def _composed(
    layer: ExpertsLayer, moments: Moments, budget: Fraction
) -> tuple[Composition, Fraction]:
    """The experts of a layer, and what is left of the budget.

    Raises:
        SpecError: not even one rank fits.
    """
    experts, left, names = dense_experts(layer), budget, names_of(layer)
    for i, name in enumerate(names):
        stack = matrices(layer, name)
        sizes = sizes_of(left / (len(names) - i), *stack.shape)
        if sizes.decomposed and not sizes.rank:
            raise SpecError(
                f"the experts of layer {layer.layer} have room for {int(budget)} "
                "numbers, expected at least one rank for each projection: choose a "
                "lower ratio"
            )
        left -= sizes.numbers(*stack.shape)
        low = moments.most_routed[layer.n_experts - sizes.decomposed :]
        if low:
            factors = shared_right(stack[low], moments.of(name)[low], sizes)
            put_factors([experts[e] for e in low], name, *factors)
    return experts, left


MOE_SVD = ours("moe-svd-like", _moe_svd, MOMENTS)
