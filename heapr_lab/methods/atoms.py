"""Methods that remove single atoms: HEAPr, controls, and Less-is-MoE by gradients.

`ratio` is a share of all routed atoms, of each layer's, or of each expert's; it is
rounded down to whole atoms of the group, except where whole experts are removed, whose
number is the smallest that reaches it.

Shapes: E n_experts, I d_inter.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from heapr_lab.methods.collectors import sum_over_windows
from heapr_lab.methods.compression import AtomCompression
from heapr_lab.methods.experts import lowest_of
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.models.grouped_linear import accumulating_dtype
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.refinement.compress import fit_compression

_HEAPR = "Li et al. 2026, HEAPr, ICLR"
_ONE_PASS = (
    "Ḡ is not formed: mean eᵀ Ḡ e equals mean h² · mean (∂ℓ/∂h)², so that one pass is "
    "enough.",
    "An expert without tokens scores 0, and its atoms go first. In the authors' code "
    "they score −1 and go first, too, where the family's loop skips such experts; "
    "where it calls them with no token, they score 0/0, which sorts highest: all of "
    "them are kept.",
    "The model is in eval mode, so auxiliary router losses, which the authors' code "
    "adds in training mode, have no part in the gradient.",
)


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
    sums = sum_over_windows(
        request.model, request.calibration, _means, request.progress
    )
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
        scores = request.measured.once(
            "intdim", lambda: mean_absolute_gradients(request)
        )
        gone = lowest_of(scores, request.ratio, scope)
        return request.keeping({layer: ~mask for layer, mask in gone.items()})

    return rule


def _variant(letter: str, where: str, scope: str) -> Method:
    """IntDim with one scope of its ranking."""
    return Method(
        f"intdim-{letter.lower()}",
        f"IntDim-{letter}: mean absolute gradient of an atom's weights, {where}",
        "Less-is-MoE 2026, EMNLP (code: HectorHHZ/Less-is-MoE)",
        "atoms",
        _intdim(scope),
        deviations=(
            "The score is that of the authors' code, the mean of |gradient| over "
            "samples; their README calls it Fisher information, but it is not squared.",
            "A sample is a calibration window; the authors take texts of different "
            "lengths, whose losses are means over their tokens.",
            "The model is in eval mode, the authors' in training mode.",
        ),
    )


ATOMS = (
    Method(
        "heapr",
        "HEAPr-G: second-order score, ranked over all layers",
        _HEAPR,
        "atoms",
        _selecting(),
        deviations=_ONE_PASS,
    ),
    Method(
        "heapr-l",
        "HEAPr-L: second-order score, ranked within each layer",
        _HEAPR,
        "atoms",
        _selecting(scope="layer"),
        deviations=_ONE_PASS,
    ),
    Method(
        "heapr-expert",
        "expert-level HEAPr: whole experts by the sum of their atoms' scores",
        _HEAPR,
        "experts",
        _selecting(granularity="expert"),
        deviations=(
            *_ONE_PASS,
            "Removed experts keep their router rows and return 0, as atoms do; "
            "experts are ranked over all layers.",
        ),
    ),
    Method(
        "magnitude",
        "control: the norm of the atom's weights, ranked over all layers",
        "Han et al. 2015, arXiv:1506.02626",
        "atoms",
        _selecting(estimator="magnitude"),
        deviations=("Whole atoms, not single weights; nothing is trained afterwards.",),
    ),
    Method(
        "random",
        "control: atoms drawn at random",
        "a control of this project",
        "atoms",
        _random,
    ),
    Method(
        "compress",
        "ours: a compensated mask, where held-out windows are in favour",
        "this project (heapr_lab.refinement.compress)",
        "atoms",
        _compress,
        deviations=(
            "The second of every four windows is held out, so the result depends on "
            "the order of the windows.",
        ),
        version=4,
    ),
    _variant("E", "ranked within each expert", "expert"),
    _variant("L", "ranked within each layer", "layer"),
    _variant("G", "ranked over all layers", "global"),
)
"""The methods of this module."""
