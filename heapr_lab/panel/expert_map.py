"""The widget that shows a number for each expert, as a grid of layers × experts.

The browser draws it (`expert_map.js`), so that a cell can be hovered, reached with the
arrow keys, and chosen. It needs nothing from another machine. Without torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anywidget
import numpy as np
import traitlets

from heapr_lab.errors import SpecError

_SCRIPT: Final = Path(__file__).with_suffix(".js")
_STYLE: Final = Path(__file__).with_suffix(".css")


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
        """Show other numbers; a chosen expert that is not among them is forgotten.

        Args:
            values: (layers, experts), NaN where a layer has no such expert.
            layers: the index of each row.
            title: what the numbers are, with their unit.
            limits: values of the first and the last colour; what is beyond has one of
                these colours, and its own number.
            percent: whether they are shares, written in per cent.
            order: (layers, experts), the experts of each row from left to right; by
                default as they are numbered.

        Raises:
            SpecError: shapes do not match, the limits are not finite and increasing, or
                a row of `order` is not a permutation.
        """
        drawn = np.asarray(values, dtype="<f4")
        columns = _checked_order(drawn, order)
        _check(drawn, layers, limits)
        with self.hold_sync():
            self.layers, self.n_columns = list(layers), drawn.shape[1]
            self.values, self.order = drawn.tobytes(), columns.tobytes()
            self.title, self.percent = title, percent
            self.low, self.high = map(float, limits)
            self.ranked = order is not None
            if self.selected is not None and not self.has(self.selected):
                self.selected = None

    def __repr__(self) -> str:
        return f"ExpertMap({self.title or 'empty'}, {len(self.layers)} layers)"

    @traitlets.validate("selected")
    def _check_selected(self, proposal: dict[str, Any]) -> list[int] | None:
        """The proposed cell.

        Raises:
            SpecError: there is none.
        """
        place: list[int] | None = proposal["value"]
        if place is not None and not self.has(place):
            raise SpecError(
                f"the chosen cell is {place}, expected layer and expert of the map, "
                f"which has the layers {', '.join(map(str, self.layers))}"
            )
        return place

    def has(self, place: Sequence[int]) -> bool:
        """Whether there is an expert, given layer and expert."""
        if len(place) != 2 or place[0] not in self.layers:
            return False
        row = np.frombuffer(self.values, "<f4").reshape(-1, self.n_columns)[
            self.layers.index(place[0])
        ]
        return 0 <= place[1] < len(row) and not np.isnan(row[place[1]])


def _check(
    values: np.ndarray, layers: Sequence[int], limits: tuple[float, float]
) -> None:
    """Check what `ExpertMap.show` is given.

    Raises:
        SpecError: as there.
    """
    if len(values) != len(layers):
        raise SpecError(
            f"the map has {len(values)} rows of values and {len(layers)} layers, "
            "expected a row for each layer"
        )
    if not (np.isfinite(limits).all() and limits[0] < limits[1]):
        raise SpecError(
            f"the colours go from {limits[0]} to {limits[1]}, expected two finite "
            "numbers, the smaller one first"
        )


def _checked_order(values: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """The columns as int32 (layers, experts).

    Raises:
        SpecError: values are no matrix, or rows of `order` are not permutations.
    """
    if values.ndim != 2 or not values.size:
        raise SpecError(
            f"the values of a map have the shape {values.shape}, expected "
            "(layers, experts)"
        )
    plain = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    columns = plain if order is None else np.asarray(order)
    if columns.shape != plain.shape or (np.sort(columns, axis=1) != plain).any():
        raise SpecError(
            f"the order of the experts has the shape {columns.shape}, expected "
            f"{values.shape}, each row with every expert once"
        )
    return columns.astype("<i4")
