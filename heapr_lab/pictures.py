"""Pictures that are drawn once and then only changed, for sliders to move.

Drawing a whole figure takes about a tenth of a second. Here everything that stays is
drawn once and kept as pixels; a change draws the bars and cells alone on top of it.
"""

import io
import threading
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.patches import Rectangle

from heapr_lab.figures import (
    layer_ratios_data,
    look,
    plot_layer_ratios,
    plot_widths,
    styled,
)
from heapr_lab.masks import KeepMask
from heapr_lab.table import ImportanceTable

_DPI = 100
_MOST_DOTS = 1024  # more experts than this, and the dots of their load cost too much
_SERIES = ["dataset", "estimator", "scope", "granularity", "structure", "multiple"]
_STYLES = ("-", "--", ":", "-.")

# matplotlib's caches of fonts and text are not made for two threads at once.
_DRAWING = threading.RLock()


class LayerPicture:
    """Bars of what is removed per layer, and a heat map of the widths that stay."""

    @styled
    def __init__(self, table: ImportanceTable) -> None:
        """Draw what does not change.

        Args:
            table: the table whose masks will be shown.
        """
        full = KeepMask.full(table)
        n_layers = len(full.layers)
        size = (8.6, min(6.0, 2.8 + 0.07 * max(0, n_layers - 8)))
        self.figure, (bars, cells) = _figure(size, columns=2)
        plot_layer_ratios(layer_ratios_data({0.0: full}), ax=bars)
        legend = bars.get_legend()
        assert legend is not None
        legend.remove()  # it names a ratio, which changes; text says what the line is
        bars.set_ylim(0, 1)
        widest = max(shape[1] for shape in table.shapes().values())
        plot_widths(full.widths(), _load(table), full_width=widest, ax=cells)
        self._bars, self._line = _rectangles(bars), bars.get_lines()[0]
        self._cells = cells.collections[0]
        self._moving: list[Artist] = [*self._bars, self._line, *cells.collections]
        self._canvas = _settle(self.figure)
        for artist in self._moving:
            artist.set_animated(True)
        self._canvas.draw()
        self._background = self._canvas.copy_from_bbox(self.figure.bbox)

    def draw(self, keep: KeepMask) -> bytes:
        """The picture of `keep`, as PNG."""
        with _DRAWING:
            ratios = keep.layer_ratios()
            for bar, ratio in zip(self._bars, ratios, strict=True):
                bar.set_height(ratio)
            self._line.set_ydata([keep.achieved_ratio] * 2)
            widths = keep.widths().to_numpy(dtype=float, na_value=np.nan)
            self._cells.set_array(np.ma.masked_invalid(widths))
            self._canvas.restore_region(self._background)
            for artist in self._moving:
                assert artist.axes is not None
                artist.axes.draw_artist(artist)
            return _png(self._canvas)


class LossPicture:
    """Loss against ratio: a line for each way of choosing, with all points so far."""

    @styled
    def __init__(self) -> None:
        self.figure, (self.ax,) = _figure((8.6, 3.2), columns=1)
        self.ax.set_xlabel("atomic experts removed [%]")
        self.ax.set_ylabel("loss [nats/token] ↓")
        self._canvas = FigureCanvasAgg(self.figure)

    def draw(self, points: pd.DataFrame) -> bytes:
        """The picture of `PruningSession.points`, as PNG.

        It may run in a thread, so it sets the style of each line itself: matplotlib's
        style contexts belong to the whole process.
        """
        with _DRAWING:
            for line in list(self.ax.get_lines()):
                line.remove()
            dense = points[points["estimator"].eq("dense")]
            pruned = points[points["estimator"].ne("dense")]
            for row in dense.itertuples():
                color = look(str(row.dataset)).color
                label = f"dense, {row.dataset}"
                self.ax.axhline(row.nll, color=color, lw=1, ls=":", label=label)
            groups = pruned.groupby(_SERIES, sort=False, dropna=False)
            styles: dict[str, str] = {}  # one for each way of choosing, in each corpus
            for (dataset, *names), group in groups:
                how = ", ".join(str(name) for name in names if not pd.isna(name))
                style = styles.setdefault(how, _STYLES[len(styles) % len(_STYLES)])
                points = group.sort_values("achieved_ratio")
                self._curve(points, label=f"{dataset}: {how}", style=style)
            self.ax.relim()
            self.ax.autoscale_view()
            self.ax.set_xlim(left=0)
            self.ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
            self._canvas.draw()
            return _png(self._canvas)

    def _curve(self, points: pd.DataFrame, *, label: str, style: str) -> None:
        first = points.iloc[0]
        self.ax.plot(
            100 * points["achieved_ratio"].astype(float),
            points["nll"].astype(float),
            color=look(first["dataset"]).color,
            marker=look(first["estimator"]).marker,
            linestyle=style,
            linewidth=1.4,
            markersize=5,
            label=label,
        )


def _figure(size: tuple[float, float], *, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure that pyplot does not know of, so that no cell shows it by itself."""
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    ratios = [1.0, 1.5][:columns]
    grid = figure.subplots(1, columns, squeeze=False, width_ratios=ratios)
    return figure, list(grid.flat)


def _rectangles(ax: Axes) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def _settle(figure: Figure) -> FigureCanvasAgg:
    """Lay the figure out, once and for all."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")
    return canvas


def _png(canvas: FigureCanvasAgg) -> bytes:
    file = io.BytesIO()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    # Speed over size: the picture travels to a browser on the same machine, mostly.
    options: dict[str, Any] = {"compress_level": 1}
    imsave(file, pixels, format="png", dpi=_DPI, pil_kwargs=options)
    return file.getvalue()


def _load(table: ImportanceTable) -> pd.DataFrame | None:
    """Routed tokens, layer × expert, unless unknown or too many to be drawn."""
    n_experts = sum(shape[0] for shape in table.shapes().values())
    if "tokens" not in table.frame or n_experts > _MOST_DOTS:
        return None
    return table.expert_tokens().pivot(index="layer", columns="expert", values="tokens")
