"""Gradients of the experts' weights, summed over windows in a way of a method's own.

The loss of a window is the sum over its predicted tokens of -log p. Every window is a
batch of its own, so its gradients depend neither on other windows nor on their order.

Shapes: E n_experts, I d_inter, D d_expert.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from heapr_lab.errors import CoverageError, HeaprLabError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import observed
from heapr_lab.models.likelihood import check_fits, input_device, token_nll
from heapr_lab.models.modes import differentiating
from heapr_lab.progress import Progress, no_report
from heapr_lab.text.calibration import CalibrationSet

Stacks = dict[str, torch.Tensor]
"""Tensors of one layer by name, such as one for each projection."""
Terms = Callable[[ExpertsLayer, torch.Tensor, torch.Tensor], Stacks]
"""What is summed, of a layer and its gradients of a window: those of the input
projection, as `ExpertsLayer.up_rows`, and of W_down, (E, D, I)."""


def sum_over_windows(
    model: nn.Module,
    calibration: CalibrationSet,
    terms: Terms,
    progress: Progress | None = None,
) -> dict[int, Stacks]:
    """What `terms` makes of the gradients of a window and layer, summed, by layer.

    Weights of experts that no token of a window is routed to have the gradient 0. The
    model is in eval mode; its modes, flags and own gradients are restored. The
    gradients of all experts are in memory at once, as large as their weights.

    Args:
        model: the dense model, which must be in memory.
        calibration: the windows.
        terms: called once for each window and layer.
        progress: called with (windows done, windows in all).

    Raises:
        SpecError: the model is streamed, or a token is not in the vocabulary.
        LayoutError: the experts cannot be measured.
        CoverageError: a layer did not take part in a backward pass.
        HeaprLabError: a gradient is not finite.
    """
    backend_of(model).require_loaded(
        remedy="gradients of weights need all of them, so load it with stream=False",
    )
    check_fits(model, calibration.ids)
    report = progress or no_report
    layers = find_experts(model)
    parameters = [weight for layer in layers for weight in layer.projections]
    sums: dict[int, Stacks] = {}
    with (
        _without_gradients(parameters),
        differentiating(model, parameters),
        observed(layers, [_Unseen()] * len(layers)),
    ):
        for number, window in enumerate(calibration.ids):
            # A clone is no inference tensor, even if the ids are one.
            ids = window[None].clone().to(input_device(model))
            token_nll(model, ids).sum().backward()
            for layer in layers:
                up, down = (_taken(layer, weight) for weight in layer.projections)
                new = terms(layer, up, down)
                before = sums.get(layer.layer, dict.fromkeys(new, 0))
                sums[layer.layer] = {n: before[n] + v for n, v in new.items()}
            report(number + 1, calibration.n_sequences)
    return sums


class _Unseen:
    """Observes nothing; with an observer the experts run in this package's own way.

    There the gradient of a weight takes one product for each expert, while that of
    transformers' eager experts is a sum of E tensors as large as the whole weight.
    """

    def observe(
        self, h: torch.Tensor, *, p: torch.Tensor, rows: torch.Tensor, tokens: list[int]
    ) -> None:
        pass


def _taken(layer: ExpertsLayer, weight: nn.Parameter) -> torch.Tensor:
    """The gradient of a weight, which has none afterwards.

    Raises:
        CoverageError: it has none.
        HeaprLabError: it is not finite.
    """
    gradient, weight.grad = weight.grad, None
    if gradient is None:
        raise CoverageError(
            f"layer {layer.layer} took no part in the pass over a window; this model "
            "does not run each experts module once per forward"
        )
    if not torch.isfinite(gradient).all():
        raise HeaprLabError(
            f"non-finite gradients in layer {layer.layer}: use bfloat16 or float32 "
            "weights, or check the calibration windows"
        )
    return layer.oriented(gradient)


@contextlib.contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Put the gradients that parameters have aside, and back afterwards."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
