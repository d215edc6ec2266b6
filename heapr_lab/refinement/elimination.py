"""Eliminate atoms one after the other, compensating each by the remaining ones.

Backward elimination with the inverse of the Gram matrix (OBS, Hassibi & Stork 1993),
for all experts of a layer at once where its features are few enough: with S² the
diagonal of C, B = (C + λ S²)⁻¹ and W the current columns of W_down, removing atom k
costs

    Δ_k = ‖w_k‖² / B_kk      and leaves      W − w_k B_k / B_kk,  B − B_k B_kᵀ / B_kk

in squared output error. The ridge λ is relative to each feature's own products, so that
neither the scale of an activation nor the load of its expert makes an atom look
expensive. The cost in loss of an expert's squared error is its price: the sum of its
`fisher` scores, its share of the corpus loss, over the summed squared contributions of
its atoms to the output. The score of an atom is its
cost when it is removed, so the masks of all ratios are nested, and every structure and
budget of `select` can use it. It needs no gradients other than those of the table.

Atoms that no token reaches cost nothing, whatever their weights; an expert with fewer
tokens than atoms has a larger ridge, because its products say little.

Shapes: E n_experts, I d_inter, D d_expert; P problems of F features: one for each
expert, or one of all experts.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from heapr_lab.importance.columns import ELIMINATION, ELIMINATION_SCHEMA
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.progress import Progress
from heapr_lab.pruning.surgery import check_table
from heapr_lab.refinement.activation_grams import LayerGrams, checked_span, iter_grams
from heapr_lab.refinement.normal_equations import in_turn, scarcity, small_factor
from heapr_lab.storage.hashing import digest
from heapr_lab.text.calibration import CalibrationSet

_PRICE = "fisher"
_RIDGE = 0.03
"""Relative to each feature's own products."""
_N_STEPS = 128
"""The cheapest atoms are removed together, a share of 1/128 at a time."""
_FLOAT32_ENOUGH = 1e-2
"""Float32 is used where its rounding, times the largest condition number that the ridge
allows, stays below this."""


def eliminate(
    model: nn.Module,
    table: ImportanceTable,
    calibration: CalibrationSet,
    *,
    progress: Progress | None = None,
) -> ImportanceTable:
    """`table` with the scores of elimination, one forward pass after it was measured.

    Args:
        model: the dense model that `table` was measured on.
        table: its statistics.
        calibration: the windows whose activations are used, usually the table's.
        progress: called with (windows done, windows in all).

    Raises:
        SpecError: the table is of another model, or autocast is on.
        LayoutError: weights are offloaded, or not finite.

    Example:
        >>> table = eliminate(model, table, calibration)  # doctest: +SKIP
        >>> keep = select(table, ratio=0.4, estimator="elimination")  # doctest: +SKIP
    """
    layers = find_experts(model)
    span = checked_span(layers)
    check_table(model, layers, table)
    grams = iter_grams(model, calibration, span=span, progress=progress)
    return with_elimination(table, calibration, grams)


def with_elimination(
    table: ImportanceTable,
    calibration: CalibrationSet,
    grams: Iterable[tuple[ExpertsLayer, LayerGrams]],
) -> ImportanceTable:
    """`table` with the scores of elimination, from sums over these windows."""
    scores = EliminationScores(table, calibration)
    for layer, sums in grams:
        scores.add(layer, sums)
        del sums  # before the sums of the next layer
    return scores.table()


class EliminationScores:
    """The scores of elimination, one layer after the other."""

    def __init__(self, table: ImportanceTable, calibration: CalibrationSet) -> None:
        """Begin with the statistics of all layers, and the windows of the sums."""
        self._table, self._frame = table, table.frame
        self._spec = elimination_spec(table, calibration)
        self._bases = table.score(_PRICE).to_numpy()
        self._scores = np.zeros(len(self._bases))

    def add(self, layer: ExpertsLayer, sums: LayerGrams) -> None:
        """Score the atoms of a layer, of which these are the sums."""
        rows = self._frame["layer"].eq(layer.layer).to_numpy()
        shape = layer.n_experts, layer.d_inter
        prices = torch.from_numpy(self._bases[rows]).unflatten(0, shape)
        self._scores[rows] = layer_costs(layer, sums, prices).flatten().numpy()

    def table(self) -> ImportanceTable:
        """The table with the scores of all layers, and what determines them."""
        frame = self._frame.assign(**{ELIMINATION: self._scores})
        described = {"spec": self._spec, "spec_hash": digest(self._spec)}
        return ImportanceTable.from_frame(frame, **self._table.metadata | described)


def elimination_spec(
    table: ImportanceTable, calibration: CalibrationSet
) -> dict[str, Any]:
    """The settings that determine the scores: the key of the cache."""
    settings = {"span": None, "ridge": _RIDGE, "n_steps": _N_STEPS}
    text = {"calibration": calibration.fingerprint, "schema": ELIMINATION_SCHEMA}
    return {**(table.metadata.get("spec") or {}), ELIMINATION: settings | text}


@torch.no_grad()
def layer_costs(
    layer: ExpertsLayer,
    grams: LayerGrams,
    bases: torch.Tensor,
    *,
    ridge: float = _RIDGE,
    n_steps: int = _N_STEPS,
) -> torch.Tensor:
    """The costs of each atom of one layer when it is removed, float64.

    Shapes: bases, the scores whose sum over an expert is the cost of its error, and
    result (E, I).

    Args:
        layer: the experts.
        grams: the sums over the calibration tokens.
        bases: see above.
        ridge: relative to each feature's own products.
        n_steps: how many shares of the atoms are removed one after the other; with as
            many as atoms, one by one.
    """
    sums = grams.total
    down = layer.down.detach().to(sums)  # (E, D, I)
    together = grams.span == "layer"
    weights = down.movedim(0, 1).flatten(1)[None] if together else down  # (P, D, F)
    energy = weights.square().sum(1) * sums.diagonal(dim1=-2, dim2=-1)  # (P, F)
    energy = energy.reshape(bases.shape).sum(1)  # (E,)
    rates = torch.where(energy > 0, bases.to(sums).sum(1) / energy, 0.0)  # (E,)
    ridges = ridge * scarcity(grams, layer.d_inter)
    rates, ridges = (
        vector.repeat_interleave(layer.d_inter).unflatten(0, (len(sums), -1))
        for vector in (rates, ridges)
    )
    chunks = in_turn(sums, sums, weights, ridges, rates)
    costs = [_costs(*chunk, n_steps=n_steps) for chunk in chunks]
    return torch.cat(costs).reshape(bases.shape).cpu()


def _costs(
    C: torch.Tensor,
    W: torch.Tensor,
    ridge: torch.Tensor,
    rates: torch.Tensor,
    *,
    n_steps: int,
) -> torch.Tensor:
    """Costs (P, F) float64 of P problems.

    Shapes: products C (P, F, F), weights W (P, D, F), ridges and rates (P, F).
    """
    size = C.diagonal(dim1=-2, dim2=-1).sqrt()  # (P, F)
    unit = torch.where(size > 0, size, 1.0)
    C = C / (unit[:, :, None] * unit[:, None])
    C.diagonal(dim1=-2, dim2=-1).add_(ridge)
    B = torch.cholesky_inverse(torch.linalg.cholesky(C))
    # An atom without routed tokens weighs nothing, and so it costs nothing.
    W = small_factor(W * size[:, None]) * (size > 0)[:, None]
    # C has ones on its diagonal: no eigenvalue is above F + λ, and none below λ.
    rounding = torch.finfo(torch.float32).eps * C.shape[-1] / float(ridge.min())
    narrow = rounding <= _FLOAT32_ENOUGH
    # Squares of any size must be numbers in float32.
    largest = _or_one(W.square().sum(1).amax(1))[:, None]  # (P, 1)
    W = W / largest.sqrt()[:, None]
    if narrow:
        B, W = B.float(), W.float()
    dearest = _or_one(rates.amax(1))[:, None]
    relative = (rates / dearest).to(B.dtype)
    rows = W.mT.contiguous()
    return _eliminated(B, rows, relative, n_steps).double() * largest * dearest


def _or_one(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 1.0)


def _eliminated(
    B: torch.Tensor, W: torch.Tensor, rate: torch.Tensor, n_steps: int
) -> torch.Tensor:
    """Costs (P, F) from inverses B (P, F, F) and weights W, which are overwritten.

    W is (P, F, D), an atom a row, whose norms are then read as they lie in memory.
    """
    costs = torch.zeros_like(rate)
    left = torch.arange(rate.shape[1], device=rate.device).expand(rate.shape)
    there = torch.ones_like(rate, dtype=torch.bool)
    level = torch.zeros_like(rate[:, :1])
    n_left = rate.shape[1]
    at_a_time = -(-n_left // n_steps)
    while n_left > 0:
        n_gone = min(at_a_time, n_left)
        if 2 * n_left <= there.shape[1]:  # smaller matrices, now and then
            pick = there.nonzero()[:, 1].view(len(there), n_left)
            left, rate = left.gather(1, pick), rate.gather(1, pick)
            W = W.take_along_dim(pick[:, :, None], 1)
            B = B.take_along_dim(pick[:, :, None], 1).take_along_dim(pick[:, None], 2)
            there = torch.ones_like(left, dtype=torch.bool)
        energy = torch.linalg.vector_norm(W, dim=2).square()
        cost = energy * rate / B.diagonal(dim1=-2, dim2=-1)
        cost = torch.where(there, cost, torch.inf)
        lowest, gone = cost.topk(n_gone, largest=False)
        lowest = lowest.maximum(level)  # later atoms never cost less
        level = lowest[:, -1:]
        costs.scatter_(1, left.gather(1, gone), lowest)
        rows = B.take_along_dim(gone[:, :, None], 1)
        block = rows.take_along_dim(gone[:, None], 2)
        solved = torch.cholesky_solve(rows, torch.linalg.cholesky(block))
        W.baddbmm_(solved.mT, W.take_along_dim(gone[:, :, None], 1), alpha=-1)
        B.baddbmm_(rows.mT, solved, alpha=-1)
        there.scatter_(1, gone, False)
        n_left -= n_gone
    return costs
