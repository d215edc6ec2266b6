"""A number for each expert, and the widget that shows them: a grid of layers × experts.

The browser draws it (`expert_map.js`), so that a cell can be hovered, reached with the
arrow keys, and chosen. It needs nothing from another machine. Without torch.
Numbers have the shape (layers, experts), in the order of the table, with as many
columns as the layer with the most experts has, and NaN where a layer has fewer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anywidget
import numpy as np
import traitlets

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask

_SCRIPT: Final = Path(__file__).with_suffix(".js")
_STYLE: Final = Path(__file__).with_suffix(".css")
_FAR = 2.0
"""Colours end at so many times the 95th percentile, if a few experts lie beyond."""


class ExpertMap(anywidget.AnyWidget):
    """A coloured cell for each expert; a click, or Enter, chooses one.

    Colours are sequential, or diverge from 0 if the scale begins below it; they follow
    the theme.

    Attributes:
        selected: layer and expert of the chosen cell, by their indices; or None.
    """

    _esm = _SCRIPT
    _css = _STYLE

    layers = traitlets.List(traitlets.Int()).tag(sync=True)
    """Indices of the rows."""
    n_columns = traitlets.Int(0).tag(sync=True)
    values = traitlets.Bytes(b"").tag(sync=True)
    """float32 (layers, experts), little-endian; NaN where there is no expert."""
    order = traitlets.Bytes(b"").tag(sync=True)
    """int32 (layers, columns), little-endian: the expert in each column."""
    title = traitlets.Unicode("").tag(sync=True)
    low = traitlets.Float(0.0).tag(sync=True)
    high = traitlets.Float(1.0).tag(sync=True)
    percent = traitlets.Bool(False).tag(sync=True)
    """Whether numbers are written in per cent."""
    ranked = traitlets.Bool(False).tag(sync=True)
    """Whether columns are ranks, and not indices of experts."""
    selected: Any = traitlets.List(
        traitlets.Int(), default_value=None, allow_none=True
    ).tag(sync=True)

    def show(
        self,
        values: np.ndarray,
        *,
        layers: Sequence[int],
        title: str,
        limits: tuple[float, float],
        percent: bool = False,
        order: np.ndarray | None = None,
    ) -> None:
        """Show other numbers.

        Args:
            values: (layers, experts), NaN where a layer has no such expert.
            layers: the index of each row.
            title: what the numbers are, with their unit.
            limits: values of the first and the last colour; what is beyond has one of
                these colours, and its own number.
            percent: whether they are shares, written in per cent.
            order: (layers, experts), the experts of each row from left to right; by
                default as they are numbered.
        """
        drawn = np.asarray(values, dtype="<f4")
        plain = np.broadcast_to(np.arange(drawn.shape[1]), drawn.shape)
        columns = np.asarray(plain if order is None else order, dtype="<i4")
        with self.hold_sync():
            self.layers, self.n_columns = list(layers), drawn.shape[1]
            self.values, self.order = drawn.tobytes(), columns.tobytes()
            self.title, self.percent = title, percent
            self.low, self.high = map(float, limits)
            self.ranked = order is not None

    def __repr__(self) -> str:
        return f"ExpertMap({self.title or 'empty'}, {len(self.layers)} layers)"


# --- the numbers ----------------------------------------------------------------------


def kept_share(table: ImportanceTable, keep: KeepMask) -> np.ndarray:
    """The share of each expert's atoms that `keep`, a mask of `table`, keeps."""
    share: np.ndarray = summed(table, keep.rows) / summed(table, np.ones(table.n_atoms))
    return share


def expert_load(table: ImportanceTable) -> np.ndarray:
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
        table: the table of the atoms.
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
    before = (count * size for index, (count, size) in shapes.items() if index < layer)
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
