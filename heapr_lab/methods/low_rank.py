"""Methods whose experts are of low rank: `svd`, the control, D²-MoE and MoE-SVD.

Factors L R in place of a matrix W change its outputs for inputs x with the second
moment M = Σ x xᵀ = S Sᵀ by Σ ‖(W − L R) x‖² = ‖(W − L R) S‖². For a given rank that is
least if L R S is the truncated singular value decomposition U_r Σ_r V_rᵀ of W S. As
this is U_r U_rᵀ W S, the factors are L = U_r, the leading eigenvectors of W M Wᵀ, and
R = U_rᵀ W: no inverse of S is needed.

D²-MoE has a common base for the experts of a layer: W_e = B + L_e R_e, where every
entry of B is the mean of the experts' entries, weighted with their Fisher information
times their tokens.

In the least sensitive layers of MoE-SVD, the experts share a right factor: W_e = U_e V,
where V is that of the expert to which most tokens are routed, U_e is fitted to it, and
where the budget is small, experts with fewer tokens take the U of others.

Shapes: E n_experts, I d_inter, D d_expert; a matrix is (out, in), its factors are
L or U (out, rank) and R or V (rank, in).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import ROWS_AT_ONCE, Stacks, activations, stacked
from heapr_lab.methods.composing import Composition, dense_experts
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.grouped_linear import accumulating_dtype
from heapr_lab.refinement.expert_calls import ExpertCalls

_DAMPING = 1e-6
"""Added to the diagonal of a moment, as a share of its mean."""
_OUTLIER = 2.0
"""An entry is an outlier if it is larger than this multiple of the mean."""
_PRINCIPAL = 0.01
"""A singular value counts if it is larger than this share of the largest."""
_LEAST_RANK = Fraction(1, 2)
"""Share of the full rank below which experts share a U rather than lower the rank."""

Factors = tuple[torch.Tensor, torch.Tensor]
"""L (out, rank) and R (rank, in)."""

# --- moments ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over the tokens routed to each expert of a layer."""

    tokens: torch.Tensor
    """How many there are, (E,), float64."""
    weights: torch.Tensor
    """Σ p, (E,), float64."""
    outliers: torch.Tensor
    """Share of the entries of h with |h| > 2 · mean |h|, (E,), float64."""
    x: torch.Tensor
    """Σ x xᵀ of the expert's inputs, (E, D, D), float64 or float32."""
    h: torch.Tensor
    """Σ h hᵀ of its activations, which W_down reads, (E, I, I), of the same type."""

    def of(self, name: str) -> torch.Tensor:
        """The moments of the inputs of `gate`, `up` or `down`, (E, in, in)."""
        return self.h if name == "down" else self.x

    @property
    def most_routed(self) -> list[int]:
        """The experts by their tokens, the most first; if equal, by their weights."""
        tokens, weights = self.tokens.tolist(), self.weights.tolist()
        experts = range(len(tokens))
        return sorted(experts, key=lambda e: (tokens[e], weights[e]), reverse=True)


def _moments(calls: ExpertCalls, expert: int) -> tuple[torch.Tensor, ...]:
    """The fields of `Moments` for one expert."""
    x, p = calls.routed(expert)
    h = activations(calls.layer, expert, x)
    size = h.abs()
    share = (
        (size > _OUTLIER * size.mean()).double().mean() if len(h) else x.new_zeros(())
    )
    count = torch.tensor(float(len(x)), dtype=torch.float64)
    return count, p.double().sum().cpu(), share.double().cpu(), _second(x), _second(h)


def _second(x: torch.Tensor) -> torch.Tensor:
    """Σ x xᵀ of the rows of x (n, d), summed in float64, (d, d)."""
    total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    for rows in x.split(ROWS_AT_ONCE):
        total += rows.double().mT @ rows.double()
    return total if x.dtype == torch.float64 else total.float()


MOMENTS = stacked(_moments, Moments)
"""`Moments` of each layer."""


# --- truncated decompositions -----------------------------------------------------


def damped(moment: torch.Tensor) -> torch.Tensor:
    """A moment (…, in, in) that can be inverted, in float64.

    The identity where no token was seen.
    """
    moment = moment.double()
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    unit = torch.eye(moment.shape[-1], dtype=torch.float64, device=moment.device)
    return torch.where(mean > 0, moment + _DAMPING * mean * unit, unit)


def truncated(matrix: torch.Tensor, rank: int, moment: torch.Tensor) -> Factors:
    """The factors of rank `rank` that change the outputs least, in float64.

    Args:
        matrix: W (…, out, in).
        rank: at most the smaller of out and in.
        moment: the moment of the inputs, (…, in, in).
    """
    wide = matrix.double()
    left = torch.linalg.eigh(wide @ damped(moment) @ wide.mT).eigenvectors[..., -rank:]
    return left, left.mT @ wide


# --- exact budgets ----------------------------------------------------------------


def ranks_of(
    shape: LayerShape, ratio: Fraction, *, layer: int, shared: int = 0
) -> dict[str, int]:
    """The rank of each projection with which a layer's experts fit the budget.

    An expert's projections cost D + I numbers for each rank; they get equal shares of
    as many ranks as fit, `down` first where that is not a whole number.

    Args:
        shape: the layer.
        ratio: the share of its parameters to remove.
        layer: its number, for messages.
        shared: numbers that are stored beside the factors, for all its experts.

    Raises:
        SpecError: a projection would have no rank; the largest ratio is named.
    """
    names = ("gate", "up", "down")[-shape.n_matrices :]
    dense = shape.d_inter * shape.atom_parameters
    beside = shape.d_inter * shape.atom_biases + Fraction(shared, shape.n_experts)
    unit = shape.d_expert + shape.d_inter
    ranks = int(((1 - ratio) * dense - beside) // unit)
    if ranks < len(names):
        most = 1 - (len(names) * unit + beside) / Fraction(dense)
        raise SpecError(
            f"ratio {float(ratio):g} leaves the experts of layer {layer} room for "
            f"{max(ranks, 0)} ranks, expected one for each of {len(names)} matrices; "
            f"the largest possible ratio is {int(most * 10**6) / 10**6:g}"
        )
    return {name: (ranks + i) // len(names) for i, name in enumerate(names)}


def stacks_of(layer: ExpertsLayer) -> Stacks:
    """Every projection of all experts, (E, out, in) by its name."""
    stacks = layer.apart(layer.up_rows, axis=1) | {"down": layer.down}
    return {name: stack.detach().contiguous() for name, stack in stacks.items()}


# --- compositions -----------------------------------------------------------------


def put_factors(
    experts: Sequence[dict[str, torch.Tensor]],
    name: str,
    left: Iterable[torch.Tensor],
    right: Iterable[torch.Tensor],
) -> None:
    """Give experts factors (out, rank) and (rank, in) in place of a matrix."""
    for expert, of_expert, into in zip(experts, left, right, strict=True):
        dtype = expert.pop(name).dtype
        expert[f"{name}_left"] = of_expert.to(dtype)
        expert[f"{name}_right"] = into.to(dtype)


# --- the control ------------------------------------------------------------------


def _svd(request: Request) -> ExpertComposition:
    """The same ranks for all experts of a layer."""
    if not request.ratio:
        return request.composed({})
    ranks = {k: ranks_of(s, request.ratio, layer=k) for k, s in request.shapes.items()}
    moments = request.measured.collected(MOMENTS, request.progress)
    compositions = {
        layer.layer: _all_truncated(layer, ranks[layer.layer], moments[layer.layer])
        for layer in find_experts(request.model)
    }
    return request.composed(compositions)


def _all_truncated(
    layer: ExpertsLayer, ranks: Mapping[str, int], moments: Moments
) -> Composition:
    """The layer's experts with truncated matrices; dense where factors cost as much."""
    experts, stacks = dense_experts(layer), stacks_of(layer)
    unit, dense = layer.d_expert + layer.d_inter, layer.d_expert * layer.d_inter
    for name, rank in ranks.items():
        if rank * unit < dense:
            factors = truncated(stacks[name], rank, moments.of(name))
            put_factors(experts, name, *factors)
    return experts


ours("svd", _svd, MOMENTS)


# --- D²-MoE -----------------------------------------------------------------------


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
    fisher = request.measured.gradients(squares, request.progress)
    compositions = {
        moe.layer: _with_base(
            moe, fisher[moe.layer], moments[moe.layer], ranks[moe.layer]
        )
        for moe in find_experts(request.model)
    }
    return request.composed(compositions)


def _with_base(
    layer: ExpertsLayer,
    fisher: Stacks,
    moments: Moments,
    ranks: Mapping[str, int],
) -> Composition:
    """The experts of a layer: a base for each projection, and their differences."""
    experts, stacks = dense_experts(layer), stacks_of(layer)
    for name, rank in ranks.items():
        stack = stacks[name]
        base = base_of(stack, fisher[name], moments.tokens).to(stack.dtype)
        apart = truncated(stack.double() - base.double(), rank, moments.of(name))
        put_factors(experts, name, *apart)
        for expert in experts:
            expert[name] = base
    return experts


ours("d2-moe", _d2_moe, MOMENTS)


# --- MoE-SVD: which layers --------------------------------------------------------


def sensitivity(layer: ExpertsLayer, moments: Moments) -> float:
    """S_L = Σ_e f_e r_e a_e.

    f is the expert's share of the routed tokens, r the mean over its matrices of the
    number of singular values above 1 % of the largest, a its share of outliers.
    """
    ranks = [
        torch.linalg.matrix_rank(stack.double(), rtol=_PRINCIPAL)
        for stack in stacks_of(layer).values()
    ]
    mean = torch.stack(ranks).double().mean(0).cpu()
    shares = moments.tokens / moments.tokens.sum()
    return float((shares * mean * moments.outliers).sum())


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


# --- MoE-SVD: how large -----------------------------------------------------------


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


# --- MoE-SVD: what is stored ------------------------------------------------------


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


# --- MoE-SVD ----------------------------------------------------------------------


def _moe_svd(request: Request) -> ExpertComposition:
    """The least sensitive layers decomposed, within one budget.

    Raises:
        SpecError: the most that one layer loses is not in (0, 1].
    """
    most = request.options["most_of_layer"]
    if not 0 < most <= 1:
        raise SpecError(f"most_of_layer is {most!r}, expected a share in (0, 1]")
    if not request.ratio:
        return request.composed({})
    shapes = request.shapes
    layers = {layer.layer: layer for layer in find_experts(request.model)}
    moments = request.measured.collected(MOMENTS, request.progress)
    scores = {k: sensitivity(layer, moments[k]) for k, layer in layers.items()}
    numbers, ratio = chosen(scores, shapes, request.ratio, Fraction(str(most)))
    compositions, left = {}, Fraction(0)
    for number in numbers:
        budget = left + _budget(shapes[number], ratio)
        layer, sums = layers[number], moments[number]
        compositions[number], left = _decomposed(layer, sums, budget)
    return request.composed(compositions)


def _budget(shape: LayerShape, ratio: Fraction) -> Fraction:
    """Numbers left for the matrices of a layer; biases are kept."""
    weights = (1 - ratio) * shape.atom_parameters - shape.atom_biases
    return shape.n_atoms * weights


def _decomposed(
    layer: ExpertsLayer, moments: Moments, budget: Fraction
) -> tuple[Composition, Fraction]:
    """The experts of a layer, and what is left of the budget.

    Raises:
        SpecError: not even one rank fits.
    """
    experts, left, stacks = dense_experts(layer), budget, stacks_of(layer)
    for i, (name, stack) in enumerate(stacks.items()):
        sizes = sizes_of(left / (len(stacks) - i), *stack.shape)
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


ours("moe-svd-like", _moe_svd, MOMENTS)
