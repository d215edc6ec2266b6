"""What only benchmarks draw: looks of variants, structures and formats, and panels."""

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heapr_lab.figures import style
from heapr_lab.figures.style import Look, figure_of

_LOOKS = {
    "heapr + compensation": Look("#56B4E9", "h", "HEAPr, compensated"),
    "elimination + compensation": Look("#222222", "*", "elimination, compensated"),
    "compress": Look("#D55E00", "o", "compress"),
    "ragged": Look("#888888", "", "ragged (a width for each expert)"),
    "aligned": Look("#0072B2", "o", "aligned"),
    "per_layer": Look("#E69F00", "^", "one width for each layer"),
    "uniform": Look("#D55E00", "s", "uniform (one width)"),
    "bfloat16": Look("#222222", "o", "pruned, bfloat16"),
    "int8": Look("#0072B2", "s", "experts in int8"),
    "int4": Look("#D55E00", "^", "experts in int4"),
    "plain": Look("#999999", "o", "forward + backward"),
    "plain_eager": Look("#CCCCCC", "o", "forward + backward, loop over experts"),
    "one_pass": Look("#0072B2", "s", "one pass"),
    "two_stage": Look("#D55E00", "^", "Algorithm 1, two stages"),
    "published": Look("#CC79A7", "D", "Algorithm 1, as published"),
}


HATCHES = ("", "///", "...", "xxx", "\\\\\\")
"""The hatches by which bars differ besides their colour."""


def look(name: str) -> Look:
    """Colour, marker and legend label of `name`, in the package's figures or here."""
    return _LOOKS.get(name) or style.look(name)


def figure_by(
    data: pd.DataFrame,
    column: str,
    plot: Callable[..., Axes],
    *,
    title: Callable[[Any], str] = str,
) -> Figure:
    """A figure with a panel for the rows of each value of a column.

    Args:
        data: rows with the column.
        column: its name.
        plot: draws some of the rows, on the Axes `ax`.
        title: makes the title of a panel from its value.
    """

    def draw(value: Any, ax: Axes) -> None:
        plot(data[data[column].eq(value)], ax=ax).set_title(title(value))

    return figure_of(data[column].drop_duplicates(), draw)
