"""A number for each expert, as the map of experts shows it: pure functions of a table.

Shapes: all are (layers, experts) in the order of the table, with as many columns as the
layer with the most experts has, and NaN where a layer has fewer. Without torch.
"""

import numpy as np

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask

_FAR = 2.0
"""Colours end at so many times the 95th percentile, if a few experts lie beyond."""


def kept_share(table: ImportanceTable, keep: KeepMask) -> np.ndarray:
    """The share of each expert's atoms that `keep`, a mask of `table`, keeps."""
    share: np.ndarray = summed(table, keep.rows) / summed(table, np.ones(table.n_atoms))
    return share


def traffic(table: ImportanceTable) -> np.ndarray:
    """Tokens routed to each expert, relative to an even share in its layer.

    NaN in a layer that no token reached.

    Raises:
        SpecError: the table has no column `tokens`.
    """
    tokens = _grid(table, table.expert_tokens()["tokens"].to_numpy())
    even = np.nanmean(tokens, axis=1, keepdims=True)
    share = np.full(tokens.shape, np.nan)
    np.divide(tokens, even, out=share, where=even > 0)
    return share


def summed(table: ImportanceTable, values: np.ndarray) -> np.ndarray:
    """The sum over the atoms of each expert.

    Args:
        table: of the atoms.
        values: one for each row of `table`, (n_atoms,).
    """
    return _grid(table, np.add.reduceat(values, first_rows(table), dtype=float))


def first_rows(table: ImportanceTable) -> np.ndarray:
    """The row of the first atom of each expert, int64 (experts of all layers,)."""
    sizes = np.concatenate(
        [np.full(n_experts, size) for n_experts, size in table.shapes().values()]
    )
    return np.concatenate([[0], np.cumsum(sizes)[:-1]])


def rows_of(table: ImportanceTable, layer: int, expert: int) -> slice:
    """The rows of the atoms of one expert, which must be there."""
    shapes = table.shapes()
    before = (count * size for own, (count, size) in shapes.items() if own < layer)
    size = shapes[layer][1]
    start = sum(before) + expert * size
    return slice(start, start + size)


def descending(values: np.ndarray) -> np.ndarray:
    """The experts of each layer by falling value, ties as numbered, NaN last."""
    return np.argsort(-values, axis=1, kind="stable")


def color_limits(values: np.ndarray, *, diverging: bool = False) -> tuple[float, float]:
    """Values of the first and the last colour: from 0, or as far on both sides of it.

    Args:
        values: what is shown; a few that are far larger than the rest do not count.
        diverging: on both sides of 0 even if no value is below it.
    """
    known = np.abs(values[np.isfinite(values)])
    top = known.max(initial=0.0)
    if top:
        top = min(top, _FAR * np.percentile(known, 95)) or top
    end = float(top) or 1.0
    return (-end if diverging or np.nanmin(values, initial=0.0) < 0 else 0.0), end


def _grid(table: ImportanceTable, values: np.ndarray) -> np.ndarray:
    """One value for each expert, in the order of the table, as (layers, experts)."""
    counts = np.array([n_experts for n_experts, _ in table.shapes().values()])
    there = np.arange(counts.max()) < counts[:, None]
    grid = np.full(there.shape, np.nan)
    grid[there] = values
    return grid
