"""A figure with its numbers, displayed by a notebook as the last expression of a cell.

The interface is that of scikit-learn's displays: compute once, then read `frame`, draw
with `plot(ax=...)`, and access the result as `figure_` and `axes_`.
"""

import base64
import html
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heapr_lab.errors import SpecError
from heapr_lab.figures import (
    atom,
    bins,
    boundary,
    calibration_size,
    comparisons,
    layers,
    mask_diff,
    scores,
    tables,
)
from heapr_lab.figures.files import rows_text, save_figure, settle, write_files
from heapr_lab.figures.style import figure_with, styled
from heapr_lab.repr_html import card_html


@dataclass(frozen=True)
class Kind:
    """How one kind of figure is computed and drawn."""

    data: Callable[..., pd.DataFrame]
    plot: Callable[..., Axes]
    figure: Callable[[pd.DataFrame], Figure] | None = None
    """Draws all panels; None if the figure has only one."""
    panel: tuple[str, ...] = ()
    """Columns that have a single value within a panel."""


KINDS: Mapping[str, Kind] = {
    "atomic_expert": Kind(
        atom.atomic_expert_data, atom.plot_atomic_expert, atom.figure_atomic_expert
    ),
    "bins": Kind(bins.bins_data, bins.plot_bins, bins.figure_bins),
    "boundary": Kind(
        boundary.boundary_data, boundary.plot_boundary, boundary.figure_boundary
    ),
    "calibration_size": Kind(
        calibration_size.calibration_size_data,
        calibration_size.plot_calibration_size,
        calibration_size.figure_calibration_size,
    ),
    "granularity": Kind(
        comparisons.granularity_data,
        comparisons.plot_granularity,
        comparisons.figure_granularity,
    ),
    "layer_ratios": Kind(
        layers.layer_ratios_data, layers.plot_layer_ratios, layers.figure_layer_ratios
    ),
    "main": Kind(tables.main_data, tables.plot_main, tables.figure_main),
    "mask_diff": Kind(
        mask_diff.mask_diff_data,
        mask_diff.plot_mask_diff,
        mask_diff.figure_mask_diff,
        panel=("shown",),
    ),
    "scope": Kind(
        comparisons.scope_data, comparisons.plot_scope, comparisons.figure_scope
    ),
    "score_histogram": Kind(scores.score_histogram_data, scores.plot_score_bins),
    "widths": Kind(layers.widths_data, layers.plot_width_cells),
}
"""Every kind by name: `boundary` has `boundary_data`, `plot_boundary`, and so on."""


class Display:
    """A figure that is drawn when it is displayed, and the rows it is drawn from.

    Attributes:
        kind: a name in `figures.KINDS`.
        frame: the rows, a tidy frame.

    Example:
        >>> data = pd.DataFrame({"ratio": 0.5, "achieved_ratio": 0.5, "layer": [0, 1],
        ...                      "layer_ratio": [0.4, 0.6]})
        >>> Display("layer_ratios", data)
        Display('layer_ratios', 2 rows of ratio, achieved_ratio, layer, layer_ratio)
    """

    def __init__(self, kind: str, frame: pd.DataFrame) -> None:
        """Store the rows of a figure.

        Args:
            kind: a name in `figures.KINDS`.
            frame: rows as the data function of that kind returns them.

        Raises:
            SpecError: there is no such kind.
        """
        self.kind = kind
        self.frame = frame
        self._functions = _kind(kind)
        self._figure: Figure | None = None
        self._axes: list[Axes] = []

    @classmethod
    def from_results(cls, kind: str, *results: Any, **options: Any) -> "Display":
        """Compute the rows with the data function of `kind`.

        Args:
            kind: a name in `figures.KINDS`.
            *results: positional arguments of that function: evaluation rows, masks by
                ratio, ...
            **options: keyword arguments of that function.

        Raises:
            SpecError: there is no such kind, or the data function raised it.
        """
        return cls(kind, _kind(kind).data(*results, **options))

    # --- drawing ----------------------------------------------------------------

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw one panel; `figure_` and `axes_` then refer to it.

        Args:
            ax: where to draw; None makes a new figure.
            **options: keyword arguments of the plot function of this kind, and, if
                the rows are of several panels, which one: `ratio`, `corpus`, ...; by
                default the first.

        Returns:
            The Axes.

        Raises:
            SpecError: there is no such panel.
        """
        chosen = {name: options.pop(name, None) for name in self._functions.panel}
        ax = self._functions.plot(self._panel(chosen), ax=ax, **options)
        self._figure, self._axes = figure_with(ax), [ax]
        return ax

    @property
    def figure_(self) -> Figure:
        """The figure that was drawn last; if there is none, all panels are drawn."""
        if self._figure is None:
            draw = self._functions.figure
            figure = figure_with(self.plot()) if draw is None else draw(self.frame)
            # This object displays it; pyplot would display it a second time.
            plt.close(figure)
            settle(figure)
            self._figure, self._axes = figure, list(figure.axes)
        return self._figure

    @property
    def axes_(self) -> list[Axes]:
        """The Axes that were drawn last: that of `plot`, or those of all panels."""
        _ = self.figure_  # draws it if necessary
        return list(self._axes)

    def _panel(self, chosen: Mapping[str, Any]) -> pd.DataFrame:
        """The rows of one panel.

        Raises:
            SpecError: there is no such panel.
        """
        rows = self.frame
        for column, wanted in chosen.items():
            held = list(rows[column].drop_duplicates())
            value = held[0] if wanted is None else wanted
            if value not in held:
                raise SpecError(
                    f"{self.kind} has no panel with {column} {value!r}; expected one "
                    f"of {', '.join(map(repr, held))}"
                )
            rows = rows[rows[column].eq(value)]
        return rows

    # --- files and notebooks ----------------------------------------------------

    def save(
        self, stem: str | Path, *, provenance: Mapping[str, Any] | None = None
    ) -> list[Path]:
        """Write `figure_` as `stem`.png and .pdf and the rows as .csv.

        Args:
            stem: path without a suffix; its folder is created.
            provenance: plain data that says where the numbers come from; the kind is
                added.

        Returns:
            The three paths.
        """
        origin = {**(provenance or {}), "figure": self.kind}
        paths = save_figure(self.figure_, stem, provenance=origin)
        return paths + write_files(stem, {"csv": rows_text(self.frame).encode()})

    @styled
    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        fields = {"Software": None}
        self.figure_.savefig(file, format="png", dpi="figure", metadata=fields)
        return file.getvalue()

    def _repr_html_(self) -> str:
        facts = {
            "rows": f"{len(self.frame):,}",
            "columns": ", ".join(map(str, self.frame.columns)),
        }
        picture = base64.b64encode(self._repr_png_()).decode()
        words = html.escape(f"{self.kind}, drawn from the rows in .frame")
        source = f"data:image/png;base64,{picture}"
        image = f'<img alt="{words}" style="max-width:100%" src="{source}">'
        return card_html(self.kind.replace("_", " "), facts, below=image)

    def __repr__(self) -> str:
        columns = ", ".join(map(str, self.frame.columns))
        return f"Display({self.kind!r}, {len(self.frame)} rows of {columns})"


def _kind(name: str) -> Kind:
    """The kind of that name.

    Raises:
        SpecError: there is no such kind.
    """
    if name not in KINDS:
        raise SpecError(f"no figure {name!r}; expected one of {', '.join(KINDS)}")
    return KINDS[name]
