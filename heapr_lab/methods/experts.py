"""Methods that drop whole experts, an equal share of each layer's.

⌊ratio · E⌋ of the E experts of a layer are dropped; at least as many are kept as a
token is routed to. They are those with the lowest scores, or, by NAEE, those without
which the layer's output changes least.

Shapes: T tokens, E n_experts, K experts of each token, D d_expert.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.methods.collectors import expert_output, expert_sums
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.expert_axes import ExpertAxis, find_expert_axes
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.modes import evaluating, exchanging
from heapr_lab.progress import Progress
from heapr_lab.pruning.ranking import lowest
from heapr_lab.refinement.expert_calls import ExpertCalls, iter_expert_calls

_MOST_PRODUCTS = 2**25
"""Entries of the Gram matrices of one layer, 256 MB in float64."""
_SAME = 0.99
"""Share of tokens that must be routed as before when the router is run again; in a
small dtype a few experts are tied."""
Subset = tuple[int, ...]
"""The experts that a layer keeps."""


def n_dropped(shape: LayerShape, ratio: Fraction, *, layer: int) -> int:
    """The number of experts that a layer loses: ⌊ratio · E⌋.

    Raises:
        SpecError: fewer would be kept than a token is routed to.
    """
    number = int(ratio * shape.n_experts)
    if shape.n_experts - number < shape.top_k:
        most = 1 - Fraction(shape.top_k, shape.n_experts)
        raise SpecError(
            f"ratio {float(ratio):g} would leave layer {layer} "
            f"{shape.n_experts - number} of {shape.n_experts} experts, but tokens are "
            f"routed to {shape.top_k} of them; the largest possible ratio is "
            f"{int(most * 10**6) / 10**6:g}"
        )
    return number


def apportioned(
    weights: Sequence[float], total: int, most: Sequence[int]
) -> tuple[int, ...]:
    """`total` units, shared in proportion to `weights` by the largest remainders.

    Each share is at most that of `most`, whose sum is at least `total`.

    Example:
        >>> apportioned([1.0, 2.0, 1.0], 5, [4, 2, 4])
        (2, 2, 1)
    """
    shares = total * (np.asarray(weights, dtype=float) / (sum(weights) or 1.0))
    units = np.minimum(shares.astype(int), most)
    order = np.argsort(units - shares, kind="stable")
    for place in itertools.chain(order, itertools.cycle(range(len(units)))):
        if units.sum() == total:
            break
        units[place] += units[place] < most[place]
    return tuple(units.tolist())


def dropping_of(
    request: Request, kept: Mapping[int, tuple[int, ...]]
) -> ExpertComposition:
    """The compression that keeps the experts of `kept`."""
    return request.composed({}, kept)


def _by(
    column: str, *, per_token: bool = False
) -> Callable[[Request], ExpertComposition]:
    """The rule that drops the experts of each layer with the lowest sum, or mean.

    Args:
        column: one of `Measurements.experts`.
        per_token: whether it is divided by the tokens routed to each expert.
    """

    def rule(request: Request) -> ExpertComposition:
        find_expert_axes(request.model)  # refused before any text is read
        layers = request.shapes
        numbers = {k: n_dropped(s, request.ratio, layer=k) for k, s in layers.items()}
        frame = request.measured.experts(request.progress)
        scores = means(frame, column) if per_token else frame[column].to_numpy(float)
        values = by_layer(frame, scores)
        kept = {
            k: tuple(np.flatnonzero(~lowest(values[k], number)).tolist())
            for k, number in numbers.items()
        }
        return dropping_of(request, kept)

    return rule


def by_layer(frame: pd.DataFrame, values: np.ndarray) -> dict[int, np.ndarray]:
    """The values of the rows of `frame`, (E,) for each layer."""
    layers = frame["layer"].to_numpy()
    return {int(k): values[layers == k] for k in np.unique(layers)}


def lowest_of(
    scores: Mapping[int, np.ndarray], ratio: Fraction, scope: str
) -> dict[int, np.ndarray]:
    """Which are the lowest ⌊ratio · n⌋ of each n scores that are ranked together.

    Args:
        scores: those of each layer, (E,) or (E, I).
        ratio: the share.
        scope: `expert`, `layer` or `global`: what is ranked together.
    """
    tables = list(scores.values())
    groups = {
        "expert": [row for table in tables for row in table],
        "layer": [table.ravel() for table in tables],
        "global": [np.concatenate([table.ravel() for table in tables])],
    }
    masks = [lowest(group, int(ratio * len(group))) for group in groups[scope]]
    ends = np.cumsum([table.size for table in tables])[:-1]
    pairs = zip(scores.items(), np.split(np.concatenate(masks), ends), strict=True)
    return {layer: mask.reshape(table.shape) for (layer, table), mask in pairs}


def means(frame: pd.DataFrame, name: str) -> np.ndarray:
    """A column divided by the tokens routed to each expert, (rows of `frame`,)."""
    tokens = np.maximum(frame["tokens"].to_numpy(), 1)
    mean: np.ndarray = frame[name].to_numpy(dtype=np.float64) / tokens
    return mean


def reap_scores(frame: pd.DataFrame) -> np.ndarray:
    """The mean of p · ‖f‖ over the tokens routed to each expert, (rows of `frame`,)."""
    return means(frame, "sum_p_norm")


def ranked(request: Request) -> dict[int, tuple[int, ...]]:
    """The experts of each layer from the lowest REAP score to the highest."""
    frame = request.measured.experts(request.progress)
    scores = by_layer(frame, reap_scores(frame))
    return {k: tuple(np.argsort(s, kind="stable").tolist()) for k, s in scores.items()}


ours("frequency", _by("tokens"), expert_sums)
ours("ean", _by("sum_norm"), expert_sums)
ours("reap", _by("sum_p_norm", per_token=True), expert_sums)
ours("man", _by("sum_norm", per_token=True), expert_sums)
ours("msan", _by("sum_norm2", per_token=True), expert_sums)


# --- NAEE -------------------------------------------------------------------------
#
# The change of a layer's output is measured on the inputs that it has in the dense
# model. With S the kept experts and w_S(x) the weights that the family's router gives
# them, it is Z − Z_S = Σ_e c_e f_e, where c = w − w_S has an entry for each expert. So
# with the Gram matrices F = ⟨f_d, f_e⟩ of each token, computed once, ‖Z − Z_S‖² =
# Σ cᵀ F c needs no further run of an expert, for any S.


class LayerLoss:
    """The change of one layer's output without some of its experts, in float64."""

    def __init__(self, axis: ExpertAxis, calls: ExpertCalls) -> None:
        """Run every expert on every token of `calls`.

        Raises:
            LayoutError: the layer's routing cannot be repeated from its inputs.
        """
        self._axis, self._inputs = axis.of_router(), calls.hidden_states
        self._n_experts = axis.layer.n_experts
        _, weights, index = routed_anew(axis.router, calls)
        self._dense = self._dispersed(index, weights, range(self._n_experts))
        outputs = [
            expert_output(axis.layer, expert, self._inputs).double()
            for expert in range(self._n_experts)
        ]
        f = torch.stack(outputs, dim=1)  # (T, E, D)
        self._grams = f @ f.mT  # (T, E, E)

    def __call__(self, kept: Subset) -> float:
        """‖Z − Z_S‖ over all tokens, where S are the experts `kept`."""
        with self._axis.narrowed(kept):
            _, weights, index = self._axis.router(self._inputs)
        c = (self._dense - self._dispersed(index, weights, kept))[:, :, None]
        squares = (c * (self._grams @ c)).sum()  # c (T, E, 1)
        return math.sqrt(max(float(squares), 0.0))

    def _dispersed(
        self, index: torch.Tensor, weights: torch.Tensor, kept: Iterable[int]
    ) -> torch.Tensor:
        """The weight of every expert for each token, (T, E); index (T, K) in `kept`."""
        numbers = torch.tensor(list(kept), device=index.device)
        whole = weights.new_zeros(len(weights), self._n_experts, dtype=torch.float64)
        return whole.scatter_add_(1, numbers[index], weights.double())


def routed_anew(
    router: nn.Module, calls: ExpertCalls
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the router makes of the experts' inputs: logits, weights, experts (T, K).

    The experts must be those of `calls`.

    Raises:
        LayoutError: they are not, so that tokens cannot be routed anew.
    """
    try:
        logits, weights, index = router(calls.hidden_states)
        mine, given = index.sort(1).values, calls.top_k_index.sort(1).values
        same = float((mine == given).all(1).double().mean())
    except (TypeError, ValueError, RuntimeError):
        same = 0.0
    if same < _SAME:
        raise LayoutError(
            f"{type(router).__name__} gives, from the inputs of the experts alone, the "
            f"experts that its block used for {same:.1%} of the tokens, expected at "
            f"least {_SAME:.0%}: tokens cannot be routed anew; use reap or frequency"
        )
    return logits, weights, index


def best_subset(loss: LayerLoss, n_experts: int, n_gone: int, *, most: int) -> Subset:
    """The experts to keep: by trying all subsets if there are at most `most`.

    Else experts go one after the other, each the one whose loss is least.
    """
    if math.comb(n_experts, n_gone) <= most:
        return min(
            itertools.combinations(range(n_experts), n_experts - n_gone), key=loss
        )
    kept = tuple(range(n_experts))
    for _ in range(n_gone):
        kept = min(itertools.combinations(kept, len(kept) - 1), key=loss)
    return kept


def kept_of_layers(
    request: Request,
    n_gone: Mapping[int, int],
    choose: Callable[[int, LayerLoss], Subset],
    progress: Progress | None = None,
) -> dict[int, Subset]:
    """The experts that each layer keeps: all, or what `choose` makes of its loss.

    Args:
        request: with the option `most_tokens`.
        n_gone: how many experts each layer loses.
        choose: takes the number of a layer that loses some, and its loss.
        progress: called with (decoder layers done, decoder layers in all).

    Raises:
        LayoutError: tokens cannot be routed to fewer experts.
    """
    axes = {axis.layer.layer: axis for axis in find_expert_axes(request.model)}
    kept = {k: tuple(range(shape.n_experts)) for k, shape in request.shapes.items()}
    if not any(n_gone.values()):
        return kept
    ids = request.calibration.ids
    for calls in iter_expert_calls(request.model, ids, progress=progress):
        number = calls.layer.layer
        if n_gone[number]:
            with evaluating(request.model), exchanging(request.model):
                some = calls.of(positions(request, calls.layer.n_experts))
                kept[number] = choose(number, LayerLoss(axes[number], some))
    return kept


def _naee(request: Request) -> ExpertComposition:
    """The subset of each layer's experts that changes its output least.

    Raises:
        SpecError: too few experts would be left.
        LayoutError: tokens cannot be routed to fewer experts.
    """
    shapes, most = request.shapes, request.options["most_subsets"]
    find_expert_axes(request.model)  # refused before the ratio is
    gone = {k: n_dropped(s, request.ratio, layer=k) for k, s in shapes.items()}

    def choose(k: int, loss: LayerLoss) -> Subset:
        return best_subset(loss, shapes[k].n_experts, gone[k], most=most)

    return dropping_of(request, kept_of_layers(request, gone, choose, request.progress))


def positions(request: Request, n_experts: int) -> torch.Tensor:
    """The tokens to measure on: the same positions, evenly spaced, of every window."""
    n_windows, length = request.calibration.ids.shape
    most = min(request.options["most_tokens"], _MOST_PRODUCTS // n_experts**2)
    step = max(1, math.ceil(n_windows * length / max(1, most)))
    places = torch.arange(n_windows)[:, None] * length + torch.arange(0, length, step)
    return places.flatten()


ours("naee", _naee)
