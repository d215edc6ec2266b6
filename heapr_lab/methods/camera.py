"""CAMERA-P: energy and peak of what an atom writes, layer by layer, without gradients.

Shapes: E n_experts, I d_inter; rows of h are routed (token, slot) pairs, n in all.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from heapr_lab.errors import SpecError
from heapr_lab.methods.compression import AtomCompression
from heapr_lab.methods.experts import lowest_of
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import masked, observed
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import no_report
from heapr_lab.streaming.layerwise import LayerByLayer

_TOKENS_AT_ONCE = 4096


def camera_scores(
    sum_ph2: np.ndarray, peak: np.ndarray, w_down_sq: np.ndarray, alpha: float
) -> np.ndarray:
    """‖w‖² · ((1 − α) · Σ (p·h)² + α · max (p·h)²) of each atom.

    Shapes: all (E, I): Σ (p·h)², max p·|h|, ‖w_down‖².

    Example:
        >>> two = [np.array([[value]]) for value in (25.0, 4.0, 9.0)]
        >>> float(camera_scores(*two, alpha=0.5)[0, 0])
        184.5
    """
    return np.asarray(w_down_sq * ((1 - alpha) * sum_ph2 + alpha * peak * peak))


class _Peaks:
    """Sums and maxima of p·h of one layer."""

    def __init__(self, layer: ExpertsLayer) -> None:
        shape = layer.n_experts, layer.d_inter
        self.sum_ph2 = torch.zeros(shape, dtype=torch.float64)
        self.peak = torch.zeros(shape, dtype=torch.float64)

    def observe(
        self,
        h: torch.Tensor,
        *,
        p: torch.Tensor,
        rows: torch.Tensor,  # noqa: ARG002 (the interface of observers)
        tokens: list[int],
    ) -> None:
        """Add one call; h (n, I) is sorted by expert."""
        weighted = h.double() * p.double()[:, None]
        for expert, products in enumerate(weighted.split(tokens)):
            if len(products):
                self.sum_ph2[expert] += products.square().sum(0).cpu()
                largest = products.abs().amax(0).cpu()
                self.peak[expert] = torch.maximum(self.peak[expert], largest)


def _sequential(request: Request) -> Iterator[tuple[int, np.ndarray]]:
    """The kept atoms of each layer, which sees the outputs of the pruned ones before.

    Each layer is run twice on all windows: to score its atoms, and without those that
    it loses.
    """
    ids, report = request.calibration.ids, request.progress or no_report
    layers = {layer.layer: layer for layer in find_experts(request.model)}
    batches = list(ids.split(max(1, _TOKENS_AT_ONCE // ids.shape[1])))
    with evaluating(request.model):
        walk = LayerByLayer(request.model, batches)
        for number, run in walk.layers():
            with contextlib.ExitStack() as contexts:
                if number in layers:
                    kept = _kept_of(request, walk, layers[number])
                    keep = torch.from_numpy(kept)
                    contexts.enter_context(masked([layers[number]], [keep]))
                    yield number, kept
                for _ in run:
                    pass
            report(number + 1, walk.n_layers)


def _kept_of(request: Request, walk: LayerByLayer, layer: ExpertsLayer) -> np.ndarray:
    """The kept atoms of the layer that is run next, (E, I)."""
    peaks = _Peaks(layer)
    with observed([layer], [peaks]):
        for index, states in enumerate(walk.states):
            walk.output(layer.layer, index, states)
    norms = layer.squared_norms()["w_down_sq"].double().cpu().numpy()
    scores = camera_scores(
        peaks.sum_ph2.numpy(), peaks.peak.numpy(), norms, request.options["alpha"]
    )
    return ~lowest_of({layer.layer: scores}, request.ratio, "layer")[layer.layer]


def _camera(request: Request) -> AtomCompression:
    """The atoms of each layer with the largest scores are kept.

    Raises:
        SpecError: alpha is not in [0, 1].
    """
    alpha = request.options["alpha"]
    if not 0 <= alpha <= 1:
        raise SpecError(f"alpha is {alpha!r}, expected a number in [0, 1]")
    return request.keeping(dict(_sequential(request)))


CAMERA = ours("camera-p", _camera)
