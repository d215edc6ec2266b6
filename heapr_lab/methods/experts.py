"""Methods that drop whole experts by a score, an equal share of each layer's.

⌊ratio · E⌋ of the E experts of a layer are dropped, those with the lowest scores; at
least as many are kept as a token is routed to.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.expert_axes import find_expert_axes
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.architecture import LayerShape
from heapr_lab.pruning.ranking import lowest


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


EXPERTS = (
    ours("frequency", _by("tokens"), EXPERT_SUMS),
    ours("ean", _by("sum_norm"), EXPERT_SUMS),
    ours("reap", _by("sum_p_norm", per_token=True), EXPERT_SUMS),
    ours("man", _by("sum_norm", per_token=True), EXPERT_SUMS),
    ours("msan", _by("sum_norm2", per_token=True), EXPERT_SUMS),
)
"""The methods of this module."""
