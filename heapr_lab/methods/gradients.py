"""Gradients of the experts' weights, one window after the other.

The loss of a window is the sum over its predicted tokens of -log p. Every window is a
batch of its own, so its gradients depend neither on other windows nor on their order.
The gradients of one layer at a time are in memory.

Shapes: E n_experts, I d_inter, D d_expert.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from heapr_lab.errors import CoverageError, HeaprLabError
from heapr_lab.methods.method import Request
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import observed
from heapr_lab.models.likelihood import check_fits, input_device, token_nll
from heapr_lab.models.modes import differentiating
from heapr_lab.progress import Progress, no_report
from heapr_lab.text.calibration import CalibrationSet


@dataclass(frozen=True, eq=False)
class WeightGradients:
    """Derivatives of the loss of one window by the weights of one layer's experts."""

    layer: ExpertsLayer
    up_rows: torch.Tensor
    """Input-projection gradient, (E, 2I, D) or (E, I, D), as `ExpertsLayer.up_rows`."""
    down: torch.Tensor
    """Gradient of W_down, (E, D, I), as `ExpertsLayer.down`."""


Visit = Callable[[WeightGradients], None]


def visit_gradients(
    model: nn.Module,
    calibration: CalibrationSet,
    visit: Visit,
    *,
    progress: Progress | None = None,
) -> None:
    """Show the gradients of each window and layer to `visit`, which must not keep them.

    Windows come in order, the layers of a window from the last to the first. Weights
    of experts that no token of the window is routed to have the gradient 0. The model
    is in eval mode; its modes, flags and own gradients are restored.

    Args:
        model: the dense model, which must be in memory.
        calibration: the windows.
        visit: called once for each window and layer, within the backward pass.
        progress: called with (windows done, windows in all).

    Raises:
        SpecError: the model is streamed, or a token is not in the vocabulary.
        LayoutError: the experts cannot be measured.
        CoverageError: a layer did not take part in a backward pass once.
        HeaprLabError: a gradient is not finite.
    """
    backend_of(model).require_loaded(
        remedy="gradients of weights need all of them, so load it with stream=False",
    )
    check_fits(model, calibration.ids)
    report = progress or no_report
    layers = find_experts(model)
    parameters = [parameter for layer in layers for parameter in layer.projections]
    with (
        _without_gradients(parameters),
        differentiating(model, parameters),
        observed(layers, [_Unseen()] * len(layers)),
        _visited(layers, visit) as visitors,
    ):
        for number, window in enumerate(calibration.ids):
            # A clone is no inference tensor, even if the ids are one.
            ids = window[None].clone().to(input_device(model))
            token_nll(model, ids).sum().backward()
            for visitor in visitors:
                visitor.end(number)
            report(number + 1, calibration.n_sequences)


def summed(
    request: Request, of: Callable[[WeightGradients], dict[str, torch.Tensor]]
) -> dict[int, dict[str, torch.Tensor]]:
    """What `of` makes of the gradients of a window and layer, summed over windows."""
    sums: dict[int, dict[str, torch.Tensor]] = {}

    def add(grads: WeightGradients) -> None:
        new, layer = of(grads), grads.layer.layer
        before = sums.get(layer, dict.fromkeys(new, 0))
        sums[layer] = {name: before[name] + value for name, value in new.items()}

    visit_gradients(request.model, request.calibration, add, progress=request.progress)
    return {layer: sums[layer] for layer in sorted(sums)}


class _Unseen:
    """Observes nothing; with an observer the experts run in this package's own way.

    There the gradient of a weight takes one product for each expert, while that of
    transformers' eager experts is a sum of E tensors as large as the whole weight.
    """

    def observe(
        self, h: torch.Tensor, *, p: torch.Tensor, rows: torch.Tensor, tokens: list[int]
    ) -> None:
        pass


class _Visitor:
    """Waits for both gradients of a layer, and shows them."""

    def __init__(self, layer: ExpertsLayer, visit: Visit) -> None:
        self._layer, self._visit, self._visits = layer, visit, 0
        self._waiting: dict[str, torch.Tensor] = {}

    def take(self, name: str, parameter: torch.Tensor) -> None:
        """Take the gradient that a parameter has just got."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._waiting[name] = self._layer.oriented(gradient)
        if len(self._waiting) == 2:
            self._visit(WeightGradients(self._layer, **self._waiting))
            self._visits += 1
            self._check_finite()
            self._waiting.clear()

    def _check_finite(self) -> None:
        if not all(torch.isfinite(grad).all() for grad in self._waiting.values()):
            raise HeaprLabError(
                f"non-finite gradients in layer {self._layer.layer}: use bfloat16 or "
                "float32 weights, or check the calibration windows"
            )

    def end(self, window: int) -> None:
        """Check that the layer took part in the window's pass.

        Raises:
            CoverageError: it did not, or more than once.
        """
        visits, self._visits = self._visits, 0
        if visits != 1:
            raise CoverageError(
                f"layer {self._layer.layer} took part {visits} times in the pass over "
                f"window {window}, expected once; this model does not run each experts "
                "module once per forward"
            )


@contextlib.contextmanager
def _visited(layers: Sequence[ExpertsLayer], visit: Visit) -> Iterator[list[_Visitor]]:
    """Show the gradients of `layers` to `visit`, once both of a layer are known."""
    visitors = [_Visitor(layer, visit) for layer in layers]
    hooks = [
        weight.register_post_accumulate_grad_hook(functools.partial(visitor.take, name))
        for visitor, layer in zip(visitors, layers, strict=True)
        for name, weight in zip(("up_rows", "down"), layer.projections, strict=True)
    ]
    try:
        yield visitors
    finally:
        for hook in hooks:
            hook.remove()


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
