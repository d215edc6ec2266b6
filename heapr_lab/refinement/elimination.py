"""Eliminate atoms one after the other, compensating each by the remaining ones.

Backward elimination with the inverse of the Gram matrix (OBS, Hassibi & Stork 1993),
for all experts of a layer at once where its features are few enough: with B = (C + λ)⁻¹
and W the current columns of W_down, removing atom k costs

    Δ_k = ‖w_k‖² / B_kk      and leaves      W − w_k B_k / B_kk,  B − B_k B_kᵀ / B_kk

in squared output error. The cost in loss of an expert's squared error is taken from the
importance table: the sum of its `shrunk` scores over the summed squared contributions
of its atoms to the output. The score of an atom is its cost when it is removed, so the
masks of all ratios are nested, and every structure and budget of `select` can use it.
It needs no gradients besides those of the table.

Shapes: E n_experts, I d_inter, D d_expert, F features of a problem: I, or E · I.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.importance.activation_grams import LayerGrams, default_span, iter_grams
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.progress import Progress
from heapr_lab.pruning.surgery import check_table
from heapr_lab.refinement.compensation import check_layers
from heapr_lab.storage.hashing import digest
from heapr_lab.text.calibration import CalibrationSet

COLUMN = "elimination"
"""The column of the table, and the estimator that reads it."""
_SCHEMA = 1
"""Raised whenever the same input would give other numbers."""
_BASE = "shrunk"
_RIDGE = 0.03
_N_STEPS = 128


def eliminate(
    model: nn.Module,
    table: ImportanceTable,
    calibration: CalibrationSet,
    *,
    span: str | None = None,
    ridge: float = _RIDGE,
    n_steps: int = _N_STEPS,
    progress: Progress | None = None,
) -> ImportanceTable:
    """`table` with the scores of elimination, one forward pass after it was measured.

    Args:
        model: the dense model that `table` was measured on.
        table: its statistics.
        calibration: the windows whose activations are used, usually the table's.
        span: whether the atoms of a "layer" or of an "expert" compensate each other, as
            in `compensation.compensate`.
        ridge: relative to the mean diagonal of the Gram matrix.
        n_steps: the cheapest atoms are removed together, a share of 1/n_steps at a
            time; with as many steps as atoms, one by one.
        progress: called with (windows done, windows in all).

    Raises:
        SpecError: the table is of another model, ridge or n_steps are not positive, or
            autocast is on.
        LayoutError: weights are offloaded, or not finite.

    Example:
        >>> table = eliminate(model, table, calibration)  # doctest: +SKIP
        >>> keep = select(table, ratio=0.4, estimator="elimination")  # doctest: +SKIP
    """
    layers = find_experts(model)
    chosen = span or default_span(layers)
    check_layers(layers, chosen)
    if not ridge > 0 or n_steps < 1:
        raise SpecError(
            f"ridge is {ridge} and n_steps {n_steps}, expected both above 0"
        )
    check_table(model, layers, table)
    grams = iter_grams(model, calibration, span=chosen, progress=progress)
    spec = elimination_spec(table, calibration, span=span, ridge=ridge, n_steps=n_steps)
    return with_elimination(table, grams, spec=spec, ridge=ridge, n_steps=n_steps)


def with_elimination(
    table: ImportanceTable,
    grams: Iterable[tuple[ExpertsLayer, LayerGrams]],
    *,
    spec: dict[str, Any] | None = None,
    ridge: float = _RIDGE,
    n_steps: int = _N_STEPS,
) -> ImportanceTable:
    """`table` with the scores of elimination, from sums that were collected before.

    `spec` describes the result; without it, the table has no specification.
    """
    frame = table.frame
    base = table.score(_BASE).to_numpy()
    scores = np.zeros(len(frame))
    for layer, own in grams:
        rows = frame["layer"].eq(layer.layer).to_numpy()
        shape = layer.n_experts, layer.d_inter
        wanted = torch.from_numpy(base[rows]).view(shape)
        costs = layer_costs(layer, own, wanted, ridge=ridge, n_steps=n_steps)
        scores[rows] = costs.flatten().numpy()
    frame[COLUMN] = scores
    unknown = {"spec", "spec_hash"}
    metadata = {k: v for k, v in table.metadata.items() if k not in unknown}
    if spec is not None:
        metadata |= {"spec": spec, "spec_hash": digest(spec)}
    return ImportanceTable.from_frame(frame, **metadata)


def elimination_spec(
    table: ImportanceTable,
    calibration: CalibrationSet,
    *,
    span: str | None = None,
    ridge: float = _RIDGE,
    n_steps: int = _N_STEPS,
) -> dict[str, Any]:
    """The settings that determine the scores: the key of the cache."""
    settings = {"span": span, "ridge": ridge, "n_steps": n_steps}
    text = {"calibration": calibration.fingerprint, "schema": _SCHEMA}
    return {**(table.metadata.get("spec") or {}), COLUMN: settings | text}


@torch.no_grad()
def layer_costs(
    layer: ExpertsLayer,
    grams: LayerGrams,
    base: torch.Tensor,
    *,
    ridge: float = _RIDGE,
    n_steps: int = _N_STEPS,
) -> torch.Tensor:
    """The cost of each atom of one layer when it is removed, (E, I) float64.

    Shapes: base (E, I), scores whose sum over an expert is the cost of its error.
    """
    down = layer.down.detach().to("cpu", torch.float64)  # (E, D, I)
    sums = grams.total
    together = grams.span == "layer"
    weights = down.movedim(0, 1).flatten(1)[None] if together else down  # (.., D, F)
    energy = weights.square().sum(1) * sums.diagonal(dim1=-2, dim2=-1)  # (blocks, F)
    energy = energy.reshape(base.shape)
    wide = base.double()
    rate = wide.sum(1, keepdim=True) / energy.sum(1, keepdim=True).clamp_min(1e-300)
    rates = rate.expand_as(energy).reshape(len(sums), -1)
    costs = [
        _costs(*problem, ridge=ridge, n_steps=n_steps)
        for problem in zip(sums, weights, rates, strict=True)
    ]
    return torch.stack(costs).reshape(base.shape)


def _costs(
    C: torch.Tensor, W: torch.Tensor, rate: torch.Tensor, *, ridge: float, n_steps: int
) -> torch.Tensor:
    """Costs (F,) of one problem: products C (F, F), weights W (D, F), rates (F,)."""
    costs = torch.zeros(len(C), dtype=C.dtype)
    seen = C.diagonal() > 0  # atoms without routed tokens cost nothing
    left = seen.nonzero()[:, 0]
    if not len(left):
        return costs
    C, W = C[left][:, left], W[:, left]
    pull = ridge * C.diagonal().mean()
    B = torch.linalg.inv(C + pull * torch.eye(len(C), dtype=C.dtype))
    level = 0.0
    for n_gone in _shares(len(left), n_steps):
        cost = W.square().sum(0) * rate[left] / B.diagonal()
        found, gone = cost.topk(n_gone, largest=False)
        found = found.clamp_min(level)  # later atoms never cost less
        costs[left[gone]], level = found, float(found[-1])
        stay = torch.ones(len(left), dtype=torch.bool)
        stay[gone] = False
        cross = B[stay][:, gone]
        solved = torch.linalg.solve(B[gone][:, gone], cross.T)
        W = W[:, stay] - W[:, gone] @ solved
        B = B[stay][:, stay] - cross @ solved
        left = left[stay]
    return costs


def _shares(n_atoms: int, n_steps: int) -> Iterator[int]:
    """Number of atoms removed in each step."""
    each = -(-n_atoms // n_steps)
    while n_atoms > 0:
        yield min(each, n_atoms)
        n_atoms -= each
