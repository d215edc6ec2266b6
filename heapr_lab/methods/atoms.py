"""Methods that remove single atoms: HEAPr, controls, Less-is-MoE, and CAMERA-P.

`ratio` is a share of all routed atoms, of each layer's, or of each expert's; it is
rounded down to whole atoms of the group, except where whole experts are removed, whose
number is the smallest that reaches it.

Shapes: E n_experts, I d_inter.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from heapr_lab.errors import number_to
from heapr_lab.methods.compression import AtomCompression
from heapr_lab.methods.experts import lowest_of
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.grouped_linear import accumulating_dtype
from heapr_lab.models.hooks import Routed, masked, observed
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import no_report
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.streaming.layerwise import LayerByLayer

_TOKENS_AT_ONCE = 4096


def _selecting(**fields: Any) -> Callable[[Request], AtomCompression]:
    """The rule that selects as `Selection(ratio, **fields)` does."""

    def rule(request: Request) -> AtomCompression:
        table = request.measured.table(request.progress)
        selection = Selection(request.ratio, **fields)  # type: ignore[arg-type]
        return request.keeping(select(table, selection))

    return rule


def _random(request: Request) -> AtomCompression:
    """Atoms with the lowest of uniform numbers that `seed` draws."""
    return _selecting(estimator="random", estimator_options={"seed": request.seed})(
        request
    )


def _compress(request: Request) -> AtomCompression:
    """A mask with compensation, or HEAPr's where held-out windows see no gain."""
    compression = fit_compression(
        request.model,
        request.calibration,
        Selection(request.ratio),  # type: ignore[arg-type]
        fitted=request.measured.fitted,
        progress=request.progress,
    )
    return request.keeping(compression.keep, compression.down_projs)


# --- Less-is-MoE ------------------------------------------------------------------


def mean_absolute_gradients(request: Request) -> dict[int, np.ndarray]:
    """Mean |∂ℓ/∂w| over windows and over the weights w of each atom, (E, I) by layer.

    ℓ is the sum of the loss over the predicted tokens of one window, and w are the
    atom's rows of the input projections and its column of W_down.
    """
    sums = request.measured.gradients(_means, request.progress)
    n_windows = request.calibration.n_sequences
    return {layer: (s["atoms"] / n_windows).numpy() for layer, s in sums.items()}


def _means(
    layer: ExpertsLayer, up_rows: torch.Tensor, down: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The mean absolute gradient of each atom's weights, (E, I) float64."""
    up, down = (
        g.abs().mean(axis, dtype=accumulating_dtype(g))
        for g, axis in ((up_rows, 2), (down, 1))
    )
    means = torch.cat([layer.by_atom(up), down[..., None]], dim=-1)
    return {"atoms": means.mean(-1).double().cpu()}  # of (E, I, 3), or 2


def _intdim(scope: str) -> Callable[[Request], AtomCompression]:
    """The rule that keeps the atoms of the largest gradients in a scope."""

    def rule(request: Request) -> AtomCompression:
        gone = lowest_of(mean_absolute_gradients(request), request.ratio, scope)
        return request.keeping({layer: ~mask for layer, mask in gone.items()})

    return rule


# --- CAMERA-P ---------------------------------------------------------------------


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

    def __call__(self, call: Routed) -> None:
        """Add one call."""
        weighted = call.h.double() * call.p.double()[:, None]
        for expert, products in enumerate(weighted.split(call.tokens)):
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
        for number in range(walk.n_layers):
            with contextlib.ExitStack() as contexts:
                if number in layers:
                    kept = _kept_of(request, walk, layers[number])
                    keep = torch.from_numpy(kept)
                    contexts.enter_context(masked([layers[number]], [keep]))
                    yield number, kept
                walk.run(number)
            report(number + 1, walk.n_layers)


def _kept_of(request: Request, walk: LayerByLayer, layer: ExpertsLayer) -> np.ndarray:
    """The kept atoms of the layer that is run next, (E, I)."""
    peaks = _Peaks(layer)
    with observed([layer], [peaks]):
        for index, given in enumerate(zip(walk.states, walk.handed, strict=True)):
            walk.output(layer.layer, index, *given)
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
    number_to(1, request.options["alpha"], name="alpha")
    return request.keeping(dict(_sequential(request)))


ours("heapr", _selecting())
ours("heapr-l", _selecting(scope="layer"))
ours("heapr-expert", _selecting(granularity="expert"))
ours("magnitude", _selecting(estimator="magnitude"))
ours("random", _random)
ours("compress", _compress)
ours("intdim-e", _intdim("expert"))
ours("intdim-l", _intdim("layer"))
ours("intdim-g", _intdim("global"))
ours("camera-p", _camera)
