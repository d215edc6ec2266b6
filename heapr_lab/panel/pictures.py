"""Pictures that are drawn once and then only updated, fast enough for sliders.

Drawing a whole figure takes about a tenth of a second. Here the fixed parts are drawn
once and kept as pixels; an update draws only the bars and cells on top of them.
"""

import contextlib
import io
import math
import textwrap
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from heapr_lab.figures import layer_ratios_data, plot_layer_ratios, styled
from heapr_lab.figures.scores import ScoreBins, ScorePicture, bin_scores
from heapr_lab.figures.style import COLORS, LABELS, LINE_STYLES, MARKERS, literal
from heapr_lab.importance.estimators import PER_TOKEN, unit_of
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.session import LOSS, setting_text
from heapr_lab.pruning.masks import KeepMask

_DPI = 100
NARROWEST, WIDEST = 1100, 2000
"""Pixels of the first picture, whose text can still be read, and of the largest."""
_N_BINS = 80
_LOAD = LinearSegmentedColormap.from_list("", ["#0072B2", "#7A4988", "#D55E00"])
"""From idle to busy; no colour is near the white to which cells fade."""
_IDLE = 0.93
"""Grey of cells without an expert."""
_LEGEND_WIDTH = 44
_FILLS = ("full", "none", "left", "top", "right", "bottom")
"""How marks are filled, by corpus."""
_N_COLORS = 7
"""The number of colours in the style."""

# matplotlib's caches of fonts and text are not thread-safe.
_DRAWING = threading.RLock()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """What is done while no other thread draws."""
    with _DRAWING:
        yield


class ChoicePicture:
    """The pruned atoms by layer (bars), by expert (cells) and by score (histogram).

    A cell's colour is the load of its expert, relative to an even share, and fades
    to white as its atoms are pruned. In the histogram pruned scores are in front.
    """

    @_alone()
    @styled
    def __init__(self, table: ImportanceTable, width: int = NARROWEST) -> None:
        """Draw the fixed parts.

        Args:
            table: the table of the masks that will be shown.
            width: that of the picture, in pixels.
        """
        full, self.width = KeepMask.full(table), width
        size = (width / _DPI, min(6.0, 2.9 + 0.07 * max(0, len(full.layers) - 8)))
        self.figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        bars, cells, bins = self.figure.subplots(1, 3, width_ratios=[1.0, 1.5, 1.1])
        self.table = table
        self._widest = full.widths().to_numpy(dtype=float)
        self._colors = _load_colors(table, full, cells)
        plot_layer_ratios(layer_ratios_data({0.0: full}), ax=bars)
        bars.set_ylim(0, 1)
        self._bars = [patch for patch in bars.patches if isinstance(patch, Rectangle)]
        self._line = bars.get_lines()[0]
        self._cells = _image(cells, self._colors, full.layers)
        self._scores = ScorePicture(bins)
        # Room for the note on hidden scores, which few estimators have.
        self._scores.show(np.array([1, 10]), np.ones(1), name="score", hidden=1)
        self._shown = "", ""
        self._bins = ScoreBins(np.ones(1), np.zeros(0, int))
        self._firsts: np.ndarray | None = None
        """Row of each expert's first atom, if whole experts are shown."""
        self._canvas = _settle(self.figure)
        self._moving: list[Artist] = [*self._bars, self._line, self._cells]
        self._moving += [self._scores.removed, self._scores.cut]
        for artist in self._moving:
            artist.set_animated(True)

    @_alone()
    def draw(
        self, keep: KeepMask, *, estimator: str, granularity: str = "atom"
    ) -> bytes:
        """The picture of `keep` as PNG, with the scores of its estimator.

        Args:
            keep: the mask.
            estimator: the estimator of the scores.
            granularity: "atom", or "expert", whose scores are sums over its atoms.
        """
        if (estimator, granularity) != self._shown:
            self._show_scores(estimator, whole=granularity == "expert")
            self._shown = estimator, granularity
            self._canvas.draw()
            self._background = self._canvas.copy_from_bbox(self.figure.bbox)
        for bar, ratio in zip(self._bars, keep.layer_ratios(), strict=True):
            bar.set_height(ratio)
        self._line.set_ydata([keep.achieved_ratio] * 2)
        widths = keep.widths().to_numpy(dtype=float, na_value=np.nan)
        share = np.nan_to_num(widths / self._widest, nan=1.0)[..., None]
        self._cells.set_data(1 - share * (1 - self._colors))
        gone = ~keep.rows if self._firsts is None else ~keep.rows[self._firsts]
        self._scores.remove(self._bins.counts(gone))
        self._canvas.restore_region(self._background)
        for artist in self._moving:
            assert artist.axes is not None
            artist.axes.draw_artist(artist)
        return _png(self._canvas)

    def _show_scores(self, estimator: str, *, whole: bool) -> None:
        """Show other scores: of atoms, or their sums over whole experts."""
        scores = self.table.scores(estimator)
        atoms = self.table.column("atom")
        self._firsts = np.flatnonzero(atoms == 0) if whole else None
        if self._firsts is not None:
            scores = np.add.reduceat(scores, self._firsts)
        self._bins = bin_scores(scores, bins=_N_BINS)
        self._scores.show(
            self._bins.edges,
            self._bins.counts(),
            # The controls name the estimator; there is no room for it here.
            name=f"score [{unit_of(estimator)}]",
            hidden=self._bins.n_not_positive,
            counted="whole experts" if whole else "atomic experts",
        )


@styled
def figure_points(points: pd.DataFrame) -> Figure:
    """Δloss against the ratio, and accuracy below it, of `PruningSession.points`.

    Settings have a colour and a marker, corpora and tasks a line style. A chart without
    points is left out.
    """
    losses, tasks = points["nll"].notna(), points["accuracy"].notna()
    charts: list[tuple[Any, pd.DataFrame, str]] = []
    if losses.any() or not tasks.any():
        pruned = points[losses & points["estimator"].ne("dense")]
        charts.append((_draw_losses, pruned, f"Δloss [{PER_TOKEN}] ↓"))
    if tasks.any():
        charts.append((_draw_accuracies, points[tasks], "accuracy [%] ↑"))
    n, ways = len(charts), _looks(zip(cycle(COLORS), cycle(MARKERS), strict=True))
    figure = Figure(figsize=(8.6, 3.4 * n))
    figure.set_layout_engine("none")  # so that charts are aligned
    room = {"left": 0.09, "right": 0.61, "bottom": 0.15 / n, "top": 1 - 0.04 / n}
    axes = figure.subplots(n, squeeze=False, gridspec_kw={**room, "hspace": 0.235})
    for ax, (draw, rows, quantity) in zip(axes[:, 0], charts, strict=True):
        styles = _looks(cycle(LINE_STYLES))
        for way, dataset, curve in _curves(rows):
            color, marker = ("0.5", "") if way == "dense" else ways[way]
            look = {"color": color, "marker": marker, "ls": styles[dataset]}
            draw(ax, curve, look | {"label": f"{dataset}, measured: {way}"})
        ax.set(xlabel=LABELS["ratio"], ylabel=quantity)
        _finish(ax)
    return figure


def _looks(looks: Iterator[Any]) -> Mapping[str, Any]:
    """Looks by name, the next one for each that is new."""
    return defaultdict(looks.__next__)


def _curves(points: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """The settings as text, the corpus or task, and the points by ratio; dense last."""
    pairs = zip(points["selection"], points["weights"], strict=True)
    named = points.assign(way=[setting_text(*pair) for pair in pairs])
    numbers = "achieved_ratio", "delta_nll", "accuracy", "stderr"
    named = named.astype(dict.fromkeys(numbers, float))
    named = named.sort_values("way", key=lambda way: way.eq("dense"), kind="stable")
    for (way, dataset), group in named.groupby(["way", "dataset"], sort=False):
        yield str(way), str(dataset), group.sort_values("achieved_ratio")


def _draw_losses(ax: Axes, curve: pd.DataFrame, look: dict[str, Any]) -> None:
    """Points with standard errors where they are known, from the dense model on."""
    x, y, error = 100 * curve["achieved_ratio"], curve["delta_nll"], curve["stderr"]
    ax.plot([0.0, *x], [0.0, *y], markevery=slice(1, None), lw=1.4, ms=5, **look)
    if error.notna().any():
        bars = {"fmt": "none", "ecolor": look["color"], "elinewidth": 1.0, "capsize": 2}
        ax.errorbar(x, y, yerr=error.fillna(0.0), **bars)


def _draw_accuracies(ax: Axes, curve: pd.DataFrame, look: dict[str, Any]) -> None:
    """Accuracy with its standard error; a line across for the dense model."""
    accuracy, error = 100 * curve["accuracy"], 100 * curve["stderr"]
    if curve["selection"].isna().all():
        ax.axhline(accuracy.iloc[0], lw=1, **look)
    else:
        x = 100 * curve["achieved_ratio"]
        ax.errorbar(x, accuracy, yerr=error, capsize=2, lw=1.4, ms=5, **look)


def _finish(ax: Axes) -> None:
    """A legend beside the axes with long labels wrapped; ratios start at 0."""
    ax.set_xlim(left=0, auto=None)  # later points may have larger ratios
    handles, labels = ax.get_legend_handles_labels()
    broken = [literal(textwrap.fill(label, _LEGEND_WIDTH)) for label in labels]
    ax.legend(
        handles, broken, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5)
    )


@styled
def figure_compared(
    frame: pd.DataFrame, layers: Mapping[str, pd.Series], *, numbers: Mapping[str, int]
) -> Figure:
    """Removed share by layer, and Δloss against the parameters saved.

    A row has one colour and one marker in both; in the right one a corpus has one way
    of filling it, and labels stand beside the points.

    Args:
        frame: as `CompareTab.frame`.
        layers: as `CompareTab.layers`, of the first rows; without any, the left one is
            left out.
        numbers: the number of the look of each row, by its label.
    """
    looks = {label: _look(number) for label, number in numbers.items()}
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    n = 2 if layers else 1
    if layers:
        _plot_layers(figure.add_subplot(1, n, 1), layers, looks)
    _plot_losses(figure.add_subplot(1, n, n), frame, looks)
    handles = [_handle(label, look, label in layers) for label, look in looks.items()]
    title = "pins" if layers.keys() == looks.keys() else "compared"
    figure.legend(handles=handles, loc="outside right upper", title=title)
    return figure


def _look(number: int) -> dict[str, Any]:
    """Colour, line and marker of a row in every plot; colours repeat in pale."""
    rounds, _ = divmod(number, _N_COLORS)
    line, mark = (looks[number % len(looks)] for looks in (LINE_STYLES, MARKERS))
    return {"color": f"C{number}", "ls": line, "marker": mark, "alpha": 0.45**rounds}


def _handle(label: str, look: dict[str, Any], pinned: bool) -> Line2D:
    """An entry of the legend; methods have no line, as their layers are not drawn."""
    line = {} if pinned else {"ls": "none"}
    return Line2D([], [], label=literal(label), ms=4, **(look | line))


def _plot_layers(
    ax: Axes, layers: Mapping[str, pd.Series], looks: Mapping[str, dict[str, Any]]
) -> None:
    for label, ratios in layers.items():
        ax.plot(ratios.index, ratios, **looks[label], ms=4, label=label)
    ax.set(xlabel="MoE layer [index]", ylabel=LABELS["layer_ratio"], ylim=(0, 1))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plot_losses(
    ax: Axes, frame: pd.DataFrame, looks: Mapping[str, dict[str, Any]]
) -> None:
    """Δloss against the parameters saved, or the atoms removed if sizes are unknown.

    Without evaluations there are only the savings. Rows at the same place are named
    together, and the first has the largest mark, so that all are seen.
    """
    known = "parameter_reduction" in frame
    across = frame["parameter_reduction" if known else "achieved_ratio"].astype(float)
    losses = frame[[name for name in frame if name.startswith(LOSS)]]
    drawn = losses if len(losses.columns) else pd.DataFrame({"": 0.0}, frame.index)
    at: dict[tuple[float, float], list[str]] = {}
    for corpus, fill in zip(drawn, cycle(_FILLS), strict=False):
        for label, x, y in zip(frame["label"], across, drawn[corpus], strict=True):
            here = at.setdefault((x, y), [])
            look = looks[label] | {"ls": "none", "ms": max(4, 9 - 2 * len(here))}
            ax.plot([x], [y], fillstyle=fill, **look)
            here.append(literal(label))
        shown = literal(str(corpus).removeprefix(LOSS))
        grey: dict[str, Any] = {"color": "0.4", "ls": "none", "fillstyle": fill}
        ax.plot([], [], "o", label=shown or "not evaluated", **grey)
    for place, labels in at.items():
        if all(map(math.isfinite, place)):
            named = ", ".join(labels)
            ax.annotate(named, place, (6, 3), textcoords="offset points", fontsize=8)
    ax.set_xlabel("parameters saved" if known else "atomic experts removed")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylabel(f"measured Δloss [{PER_TOKEN}] ↓")
    ax.margins(0.15)
    ax.legend(fontsize=8)


@_alone()
def drawn_png(draw: Callable[[], Figure], width: int | None = None) -> bytes:
    """A new figure as PNG, `width` pixels wide if it is given."""
    figure = draw()
    figure.set_dpi(_DPI)
    if width is not None:
        figure.set_figwidth(width / _DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return _png(canvas)


def _load_colors(table: ImportanceTable, full: KeepMask, ax: Axes) -> np.ndarray:
    """(layers, experts, 3): the colour of each unpruned expert."""
    missing = full.widths().isna().to_numpy()
    load = np.ones(missing.shape)
    if "tokens" in table.frame:
        tokens = table.expert_tokens().pivot(index="layer", columns="expert")
        load = tokens.div(tokens.mean(axis=1), axis=0).fillna(1.0).to_numpy()
    scale = ScalarMappable(Normalize(0, 2), _LOAD)
    colors = np.asarray(scale.to_rgba(load))[..., :3]
    colors[missing] = _IDLE
    bar = ax.figure.colorbar(scale, ax=ax, pad=0.02, extend="max")
    bar.set_label("expert load [× even share]")
    return colors


def _image(ax: Axes, colors: np.ndarray, layers: tuple[int, ...]) -> Any:
    image = ax.imshow(colors, aspect="auto", interpolation="nearest", vmin=0, vmax=1)
    step = max(1, -(-len(layers) // 24))
    ax.set_yticks(np.arange(len(layers))[::step], [str(k) for k in layers[::step]])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False)
    ax.set_xlabel("expert [index], blank: all atoms pruned")
    ax.set_ylabel("MoE layer [index]")
    return image


def _settle(figure: Figure) -> FigureCanvasAgg:
    """Lay out the figure, and fix the layout."""
    canvas, engine = FigureCanvasAgg(figure), figure.get_layout_engine()
    assert engine is not None  # which the figure was made with
    engine.execute(figure)
    figure.set_layout_engine("none")
    return canvas


def _png(canvas: FigureCanvasAgg) -> bytes:
    """What is drawn, without its transparency."""
    file, pixels = io.BytesIO(), np.asarray(canvas.buffer_rgba())[..., :3]
    # Speed matters more than size: the browser is usually on the same machine.
    options: dict[str, Any] = {"compress_level": 1}
    imsave(file, pixels, format="png", dpi=_DPI, pil_kwargs=options)
    return file.getvalue()
