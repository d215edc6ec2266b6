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
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.models.grouped_linear import accumulating_dtype
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.refinement.compress import fit_compression


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


ATOMS = (
    ours("heapr", _selecting()),
    ours("heapr-l", _selecting(scope="layer")),
    ours("heapr-expert", _selecting(granularity="expert")),
    ours("magnitude", _selecting(estimator="magnitude")),
    ours("random", _random),
    ours("compress", _compress),
    ours("intdim-e", _intdim("expert")),
    ours("intdim-l", _intdim("layer")),
    ours("intdim-g", _intdim("global")),
)
"""The methods of this module."""
