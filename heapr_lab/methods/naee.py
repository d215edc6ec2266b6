"""NAEE: the experts of each layer without which its output changes least.

The change of a layer's output is measured on the inputs that the dense model gives it.
With S the kept experts and w_S(x) the weights that the family's router gives them, it
is Z − Z_S = Σ_e c_e f_e, where c = w − w_S has an entry for each expert. So with the
Gram matrices F = ⟨f_d, f_e⟩ of each token, computed once, ‖Z − Z_S‖² = Σ cᵀ F c needs
no further run of an expert, for any S.

Shapes: T tokens, E n_experts, K experts of each token, D d_expert.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from heapr_lab.errors import LayoutError
from heapr_lab.methods.collectors import expert_output
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.expert_axes import ExpertAxis, find_expert_axes
from heapr_lab.methods.experts import dropping_of, n_dropped
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.modes import evaluating, exchanging
from heapr_lab.progress import Progress
from heapr_lab.refinement.expert_calls import ExpertCalls, iter_expert_calls

_MOST_PRODUCTS = 2**25
"""Entries of the Gram matrices of one layer, 256 MB in float64."""
_SAME = 0.99
"""Share of tokens that must be routed as before when the router is run again; in a
small dtype a few experts are tied."""

Subset = tuple[int, ...]


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
    for layer, calls in iter_expert_calls(request.model, ids, progress=progress):
        number = layer.layer
        if n_gone[number]:
            with evaluating(request.model), exchanging(request.model):
                some = calls.of(positions(request, layer.n_experts))
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


NAEE = ours("naee", _naee)
