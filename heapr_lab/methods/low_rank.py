"""What low-rank methods have in common, and `svd`, the control that does nothing else.

Factors L R in place of a matrix W change its outputs for inputs x with the second
moment M = Σ x xᵀ = S Sᵀ by Σ ‖(W − L R) x‖² = ‖(W − L R) S‖². For a given rank that is
least if L R S is the truncated singular value decomposition U_r Σ_r V_rᵀ of W S. As
this is U_r U_rᵀ W S, the factors are L = U_r, the leading eigenvectors of W M Wᵀ, and
R = U_rᵀ W: no inverse of S is needed.

Shapes: E n_experts, I d_inter, D d_expert; a matrix is (out, in), its factors are
L (out, rank) and R (rank, in).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import ROWS_AT_ONCE, Collector, activations
from heapr_lab.methods.composed_experts import Composition
from heapr_lab.methods.composing import dense_experts
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.refinement.expert_calls import ExpertCalls

_DAMPING = 1e-6
"""Added to the diagonal of a moment, as a share of its mean."""
_OUTLIER = 2.0
"""An entry is an outlier if it is larger than this multiple of the mean."""

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


def _moments_of_layer(
    _model: nn.Module, layer: ExpertsLayer, calls: ExpertCalls
) -> Moments:
    """The moments of every expert of a layer."""
    rows = [_moments(layer, calls, expert) for expert in range(layer.n_experts)]
    return Moments(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _moments(
    layer: ExpertsLayer, calls: ExpertCalls, expert: int
) -> tuple[torch.Tensor, ...]:
    """The fields of `Moments` for one expert."""
    x, p = calls.routed(expert)
    h = activations(layer, expert, x)
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


MOMENTS = Collector("moments of routed inputs", _moments_of_layer)
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


def matrices(layer: ExpertsLayer, name: str) -> torch.Tensor:
    """A projection of every expert, (E, out, in), a copy."""
    return torch.stack([layer.expert(e)[name] for e in range(layer.n_experts)])


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
    experts = dense_experts(layer)
    unit, dense = layer.d_expert + layer.d_inter, layer.d_expert * layer.d_inter
    for name, rank in ranks.items():
        if rank * unit < dense:
            factors = truncated(matrices(layer, name), rank, moments.of(name))
            put_factors(experts, name, *factors)
    return experts


SVD = ours("svd", _svd, MOMENTS)
