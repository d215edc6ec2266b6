"""Less-is-MoE: atoms by the mean absolute gradient of their weights.

Shapes: E n_experts, I d_inter, D d_expert.
"""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch

from heapr_lab.methods.atoms import compression_of
from heapr_lab.methods.compression import AtomCompression
from heapr_lab.methods.gradients import WeightGradients, visit_gradients
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.experts import find_experts
from heapr_lab.models.grouped_linear import accumulating_dtype
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.ranking import lowest

Scores = dict[int, np.ndarray]
"""The score of each atom, (E, I), by layer."""


def mean_absolute_gradients(request: Request) -> Scores:
    """Mean |∂ℓ/∂w| over windows and over the weights w of each atom.

    ℓ is the sum of the loss over the predicted tokens of one window, and w are the
    atom's rows of the input projections and its column of W_down.
    """
    sums = {
        layer.layer: torch.zeros(layer.n_experts, layer.d_inter, dtype=torch.float64)
        for layer in find_experts(request.model)
    }

    def add(grads: WeightGradients) -> None:
        layer = grads.layer
        rows = layer.by_atom(
            grads.up_rows.abs().mean(2, dtype=accumulating_dtype(grads.up_rows))
        )
        down = grads.down.abs().mean(1, dtype=accumulating_dtype(grads.down))  # (E, I)
        means = torch.cat([rows, down[..., None]], dim=-1)  # (E, I, 3), or 2
        sums[layer.layer] += means.mean(-1).double().cpu()

    calibration = request.calibration
    visit_gradients(request.model, calibration, add, progress=request.progress)
    n_windows = calibration.n_sequences
    return {layer: (total / n_windows).numpy() for layer, total in sums.items()}


def _of_experts(scores: Scores, ratio: Fraction) -> Scores:
    """The kept atoms: all but the lowest ⌊ratio · I⌋ of each expert."""
    return {
        layer: np.stack([~lowest(row, int(ratio * rows.shape[1])) for row in rows])
        for layer, rows in scores.items()
    }


def _of_layers(scores: Scores, ratio: Fraction) -> Scores:
    """The kept atoms: all but the lowest ⌊ratio · n⌋ of each layer."""
    return {
        layer: ~lowest(table.ravel(), int(ratio * table.size)).reshape(table.shape)
        for layer, table in scores.items()
    }


def _of_model(scores: Scores, ratio: Fraction) -> Scores:
    """The kept atoms: all but the lowest ⌊ratio · n⌋ of the model."""
    every = np.concatenate([table.ravel() for table in scores.values()])
    kept = ~lowest(every, int(ratio * every.size))
    ends = np.cumsum([table.size for table in scores.values()])[:-1]
    pairs = zip(scores.items(), np.split(kept, ends), strict=True)
    return {layer: mask.reshape(table.shape) for (layer, table), mask in pairs}


def _keeping(
    kept: Callable[[Scores, Fraction], Scores],
) -> Callable[[Request], AtomCompression]:
    """The rule that keeps the atoms that `kept` selects by their gradients."""

    def rule(request: Request) -> AtomCompression:
        scores = request.measured.once(
            "intdim", lambda: mean_absolute_gradients(request)
        )
        arrays = kept(scores, request.ratio)
        return compression_of(request, KeepMask(arrays, request.made.to_dict()))

    return rule


def _variant(
    letter: str, where: str, kept: Callable[[Scores, Fraction], Scores]
) -> Method:
    """IntDim with one scope of its ranking."""
    return Method(
        f"intdim-{letter.lower()}",
        f"IntDim-{letter}: mean absolute gradient of an atom's weights, {where}",
        "Less-is-MoE 2026, EMNLP (code: HectorHHZ/Less-is-MoE)",
        "atoms",
        _keeping(kept),
        deviations=(
            "The score is that of the authors' code, the mean of |gradient| over "
            "samples; their README calls it Fisher information, but it is not squared.",
            "A sample is a calibration window; the authors take texts of different "
            "lengths, whose losses are means over their tokens.",
            "The model is in eval mode, the authors' in training mode.",
        ),
    )


INTDIM = (
    _variant("E", "ranked within each expert", _of_experts),
    _variant("L", "ranked within each layer", _of_layers),
    _variant("G", "ranked over all layers", _of_model),
)
"""The methods of this module."""
