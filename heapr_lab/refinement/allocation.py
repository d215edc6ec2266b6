"""How much each layer loses: by global rank, or corrected by measured losses.

A global ranking spends the atoms where the scores say that loss is cheapest. Scores of
different layers may be off by different factors, which can be measured: prune one layer
alone, as the ranking would, and compare the loss with the sum of its removed scores.
Ranking the scores times these factors solves the knapsack of the corrected curves: it
removes equally many atoms for the least corrected loss.

Source: this project.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection

_MOST = 8.0
"""No layer's factor is further than this from their geometric mean."""
_STRUCTURES = ("ragged", "aligned", "per_layer")


def can_reallocate(selection: Selection) -> bool:
    """Whether layers of `selection` may lose other shares than the ranking gives."""
    free = not selection.own_layers and not selection.exclude_layers
    return (
        free
        and (selection.scope, selection.granularity) == ("global", "atom")
        and selection.structure in _STRUCTURES
        and selection.of == "atoms"
        and selection.price is None
    )


def alone(keep: KeepMask, layer: int) -> KeepMask:
    """The mask that prunes one layer as `keep` does, and no other."""
    return KeepMask.from_arrays(
        {
            k: keep.by_layer(k) if k == layer else np.ones_like(keep.by_layer(k))
            for k in keep.layers
        }
    )


def layer_factors(
    table: ImportanceTable,
    keep: KeepMask,
    estimator: str,
    measure: Callable[[int], float],
) -> dict[int, float]:
    """Measured over predicted loss of each layer, with the geometric mean 1.

    Args:
        table: the scores.
        keep: the mask that they select.
        estimator: whose scores they are.
        measure: returns the loss increase when that layer alone is pruned.
    """
    scores = np.where(keep.rows, 0.0, table.score(estimator).to_numpy())
    removed = table.frame["layer"].groupby(table.frame["layer"]).size().index
    layers = table.frame["layer"].to_numpy()
    predicted = {int(k): float(scores[layers == k].sum()) for k in removed}
    measured = {k: measure(k) for k, p in predicted.items() if p > 0}
    usual = sum(max(v, 0.0) for v in measured.values()) / max(
        sum(predicted[k] for k in measured), 1e-300
    )
    if not usual > 0:
        return dict.fromkeys(predicted, 1.0)
    logs = {
        k: np.log(max(value / predicted[k] / usual, 1 / _MOST))
        for k, value in measured.items()
    }
    middle = float(np.mean(list(logs.values())))
    bound = np.log(_MOST)
    return {
        k: float(np.exp(np.clip(logs.get(k, middle) - middle, -bound, bound)))
        for k in predicted
    }


def reallocated(
    table: ImportanceTable,
    selection: Selection,
    factors: Mapping[int, float],
    *,
    n_removed: int,
) -> Selection:
    """`selection` with a ratio for each layer, by scores times the layers' factors.

    Raises:
        SpecError: its layers cannot lose other shares than its own ranking gives.
    """
    if not can_reallocate(selection):
        raise SpecError(
            "layers cannot be given measured shares for this selection: expected a "
            "global ranking of atoms, of all layers, in one of the structures "
            f"{', '.join(_STRUCTURES)}"
        )
    layers = table.frame["layer"].to_numpy()
    scale = np.vectorize(factors.__getitem__, otypes=[float])(layers)
    scores = table.score(selection.estimator).to_numpy() * scale
    cheapest = np.argsort(scores, kind="stable")[:n_removed]
    sizes = dict(zip(*np.unique(layers, return_counts=True), strict=True))
    counts = dict(zip(*np.unique(layers[cheapest], return_counts=True), strict=True))
    return replace(selection, layer_ratios=_ratios(counts, sizes))


def _ratios(
    counts: Mapping[int, int], sizes: Mapping[int, int]
) -> tuple[tuple[int, float], ...]:
    """The share of each layer's atoms to prune; at least one atom stays."""
    gone = {k: min(int(counts.get(k, 0)), int(size) - 1) for k, size in sizes.items()}
    exact: Any = [(int(k), Fraction(gone[k], int(sizes[k]))) for k in sizes]
    return tuple(exact)  # Selection accepts fractions
