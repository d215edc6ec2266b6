"""The style of all figures: a style file, and a colour and a marker for each name.

Names are estimators (`heapr`), granularities (`atom`), scopes (`layer`) and corpora
(`ptb`). A name has the same look in every figure, from `looks.toml`.
"""

import functools
import textwrap
import tomllib
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

STYLE_FILE = Path(__file__).with_name("heapr.mplstyle")
"""The matplotlib style every figure is drawn and saved with."""
_DATA = tomllib.loads(Path(__file__).with_name("looks.toml").read_text("utf-8"))

PAPER_GREY = "#555555"
REFERENCE_GREY = "#888888"
ATOM_COLOR = "#D55E00"
"""Colour of removed atoms."""

LABELS: dict[str, str] = _DATA["axes"]
"""Axis label of each quantity: name, unit, and an arrow towards the better end."""

_LABEL_WIDTH, _NARROW = 40, 26
"""Letters of a line of a legend below the panels, or in place of one."""
_BESIDE = 5
"""Points between a point and its name where they need no line."""
_SIDES = tuple(
    (x * far, y * far, align, vertical)
    for far in (_BESIDE, 13, 21, 29)
    for x, y, align, vertical in (
        (1, 0, "left", "center"),
        (-1, 0, "right", "center"),
        (0, 1, "center", "bottom"),
        (0, -1, "center", "top"),
    )
)
"""Where the name of a point may stand, in points from it: the nearest that is free."""

_LEADER = {"arrowstyle": "-", "color": "#666666", "linewidth": 0.6, "shrinkB": 4}
"""The line from a point to a name that is not right beside it."""

REFERENCE_LINE: dict[str, Any] = {
    "color": REFERENCE_GREY,
    "linestyle": "--",
    "linewidth": 1,
}
"""Keywords of a line that curves or points are compared with."""

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Look:
    """How a name is drawn in every figure."""

    color: str
    marker: str
    label: str

    def keywords(self) -> dict[str, Any]:
        """Keywords of matplotlib's `plot` and `errorbar`."""
        return asdict(self)


_LOOKS = {name: Look(**entry) for name, entry in _DATA["looks"].items()}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINE_STYLES = ("-", "--", ":", "-.")
"""Looks for names that have none of their own, in the order in which they are given."""


def look(name: str) -> Look:
    """Colour, marker and legend label of `name`.

    Other names get a look from a checksum of the name, so that it is the same in every
    figure.
    """
    if name in _LOOKS:
        return _LOOKS[name]
    number = zlib.crc32(name.encode())
    return Look(COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)], name)


def place(name: str) -> int:
    """Position of `name` in legends and tables; unknown names are last."""
    known = list(_LOOKS)
    return known.index(name) if name in known else len(known)


def prefer_own_fonts() -> None:
    """Make matplotlib prefer its own fonts to system fonts of the same name.

    Matplotlib looks up names in a list that all environments of a user share. The list
    may lack matplotlib's own fonts or begin with those of the system, which have the
    same glyphs but other tables, and a PDF file contains these tables.
    """
    folder = Path(mpl.get_data_path(), "fonts", "ttf")
    manager = font_manager.fontManager
    known = {entry.fname for entry in manager.ttflist}
    for path in map(str, sorted(folder.glob("*.ttf"))):
        if path not in known:
            manager.addfont(path)
    manager.ttflist.sort(
        key=lambda entry: (Path(entry.fname).parent != folder, entry.fname)
    )


# Matplotlib caches fonts that were found before this import, but by the settings of the
# search, which are not those of the house style.
prefer_own_fonts()


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which then runs in the house style."""

    @functools.wraps(function)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> R:
        # The backend of a notebook turns interactive mode on at its first use; inside
        # the context, this would be undone at the end, and later figures not be shown.
        plt.draw_if_interactive()
        with plt.style.context(STYLE_FILE):
            return function(*args, **kwargs)

    return in_style


def own_axes(ax: Axes | None) -> Axes:
    """`ax`, or the Axes of a new small figure; never the current Axes."""
    return plt.subplots(figsize=(4.6, 3.2))[1] if ax is None else ax


def figure_of(
    items: Iterable[T], draw: Callable[[T, Axes], object], *, height: float = 2.7
) -> Figure:
    """A figure of README width with a panel for each item and one legend.

    At most three panels are in a row.

    Args:
        items: what the panels show.
        draw: draws one item on its Axes.
        height: the height of a row of panels, in inches.
    """
    items = list(items)
    columns = min(len(items), 3) if len(items) != 4 else 2
    rows = -(-len(items) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(7, height * rows + 0.5), squeeze=False
    )
    for spare in grid.flat[len(items) :]:
        spare.remove()
    for item, ax in zip(items, grid.flat, strict=False):
        draw(item, ax)
    _share_legend(figure)
    return figure


def _share_legend(figure: Figure) -> None:
    """One legend of all panels: where a panel is missing, or below."""
    entries = _entries(figure.axes)
    if not entries:
        return
    figure.draw_without_rendering()  # a legend is fitted to the first layout
    free = _free_cell(figure)
    if free is not None:
        narrow = _entries(figure.axes, width=_NARROW)
        figure.legend(
            list(narrow.values()), list(narrow), loc="center", bbox_to_anchor=free
        )
        return
    for columns in range(len(entries), 0, -1):
        legend = figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower center",
            ncols=columns,
        )
        if legend.get_window_extent().width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def _free_cell(figure: Figure) -> Bbox | None:
    """The last cell of the grid, in shares of the figure, if no panel is there."""
    grid = figure.axes[0].get_gridspec()
    if grid is None or grid.nrows * grid.ncols <= len(figure.axes):
        return None
    above, beside = (figure.axes[n].get_position() for n in (grid.ncols - 1, -1))
    return Bbox([[above.x0, beside.y0], [above.x1, beside.y1]])


def name_points(ax: Axes, names: Mapping[str, tuple[float, float]]) -> None:
    """Write the name of each point beside it, over no point of a line and no name.

    Nor is it written over a level line.

    Args:
        ax: where everything else is drawn already, with its scales.
        names: coordinates of each name's point.
    """
    figure = ax.get_figure(root=True)
    assert figure is not None  # it was not removed from its figure
    figure.draw_without_rendering()  # which places the Axes
    inner = ax.bbox.padded(-4)  # a legend below may shrink the Axes later
    lines = [line for line in ax.get_lines() if line.get_transform() == ax.transData]
    points = [np.asarray(line.get_xydata()) for line in lines]
    marks = ax.transData.transform(np.vstack([np.empty((0, 2)), *points]))
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in marks]
    taken += [text.get_window_extent() for text in ax.texts]
    level = [x for x in ax.get_lines() if x.get_transform() == ax.get_yaxis_transform()]
    taken += [line.get_window_extent().padded(2) for line in level]
    for name, point in names.items():
        at = ax.transAxes.inverted().transform(ax.transData.transform(point))[0]
        middle = "right" if at > 0.75 else "center"  # the Axes may become narrower
        for x, y, align, vertical in _SIDES:
            text = ax.annotate(
                name,
                point,
                xytext=(x, y),
                textcoords="offset points",
                ha=middle if align == "center" else align,
                va=vertical,
                fontsize=8,
                color="#666666",
                arrowprops=_LEADER if abs(x + y) > _BESIDE else None,
            )
            text.get_window_extent()  # which places it
            box = Text.get_window_extent(text)  # without its line
            inside = inner.contains(*box.min) and inner.contains(*box.max)
            if inside and not box.count_overlaps(taken):
                break
            text.remove()
        else:
            ax.add_artist(text)
        taken.append(box)


def _entries(axes: Iterable[Axes], *, width: int = _LABEL_WIDTH) -> dict[str, Any]:
    """Legend handles by label, without repetition: curves, lines, then the paper's."""
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)

    def rank(label: str) -> tuple[bool, bool]:
        return label.startswith("paper"), isinstance(handles[label], Line2D)

    ordered = sorted(handles, key=rank)
    return {literal(textwrap.fill(label, width)): handles[label] for label in ordered}


def literal(text: str) -> str:
    """`text` as Matplotlib shows it as it is: dollars begin no formula."""
    return text.replace("$", r"\$")


def show_percent(axis: Axis) -> None:
    """Format fractions on `axis` in per cent; the unit belongs to the label."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:g}".replace("-", "−"))
