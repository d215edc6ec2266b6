"""Figure 7: a picture of what an atomic expert is, drawn from its definition.

Letters: `W_gate`, `W_up` (d_inter, d_model), `W_down` (d_model, d_inter); x is one
token's input, h_k the activation of atomic expert k. (The paper writes the transposes
and so speaks of columns of `W_gate` and `W_up`.)
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from heapr_lab.figures.style import ATOM_COLOR, figure_with, own_axes, styled

_D_MODEL, _D_INTER, _ATOM = 6, 9, 3
"""Cells along the widths of the model and of the expert; the highlighted atom."""
_INK = "#444444"
_OPERATOR_X = 14.2
_PRODUCT_X = 17.4
_CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}


def atomic_expert_data() -> pd.DataFrame:
    """The cells of the picture: every entry of the matrices, and whose it is.

    Returns:
        Columns matrix ("x", "W_gate", "W_up", "W_down", "e_k", "E"), row, column,
        of_atom (it belongs to the highlighted atomic expert), left and bottom
        (position).
    """
    half = _D_MODEL / 2
    gap = 1.4
    down_left = _PRODUCT_X + 4.8
    right = down_left + _D_INTER
    # name: (rows, columns, left, bottom, rows of the atom, columns of the atom)
    parts = {
        "x": (_D_MODEL, 1, 0.0, -half, None, None),
        "W_gate": (_D_INTER, _D_MODEL, 4.0, gap, _ATOM, None),
        "W_up": (_D_INTER, _D_MODEL, 4.0, -gap - _D_INTER, _ATOM, None),
        "W_down": (_D_MODEL, _D_INTER, down_left, -half, None, _ATOM),
        "e_k": (_D_MODEL, 1, right + 2.2, -half, None, 0),
        "E": (_D_MODEL, 1, right + 6.4, -half, None, None),
    }
    frames = []
    for name, (rows, columns, left, bottom, atom_row, atom_column) in parts.items():
        row, column = (axis.ravel() for axis in np.indices((rows, columns)))
        frames.append(
            pd.DataFrame(
                {
                    "matrix": name,
                    "row": row,
                    "column": column,
                    "of_atom": (row == atom_row) | (column == atom_column),
                    "left": left + column,
                    "bottom": bottom + rows - 1 - row,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


@styled
def plot_atomic_expert(
    data: pd.DataFrame | None = None, *, ax: Axes | None = None
) -> Axes:
    """Row k of `W_gate` and of `W_up`, column k of `W_down`, and what they compute.

    Args:
        data: from `atomic_expert_data`, which is called where it is left out.
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes, without axis lines.
    """
    data = atomic_expert_data() if data is None else data
    ax = own_axes(ax, size=(7, 4.4))
    boxes = _boxes(data)
    _draw_cells(ax, data, boxes)
    _label_parts(ax, boxes)
    _draw_flow(ax, data, boxes)
    ax.set_aspect("equal")
    ax.set_xlim(-2.4, boxes.loc["E", "right"] + 2.6)
    ax.set_ylim(boxes.loc["W_up", "bottom"] - 4.6, boxes.loc["W_gate", "top"] + 1.9)
    ax.set_axis_off()
    return ax


def _draw_cells(ax: Axes, data: pd.DataFrame, boxes: pd.DataFrame) -> None:
    # the shades are random and carry no information
    shades = np.random.default_rng(7).uniform(0.25, 1.0, size=len(data))
    plain, accent = np.array(to_rgb("#AEB6BF")), np.array(to_rgb(ATOM_COLOR))
    for cell, shade in zip(data.itertuples(), shades, strict=True):
        color, depth = (accent, 0.6 + 0.4 * shade) if cell.of_atom else (plain, shade)
        ax.add_patch(
            Rectangle(
                (cell.left, cell.bottom),
                1,
                1,
                facecolor=tuple(1 - depth * (1 - color)),
                edgecolor="white",
                linewidth=0.8,
            )
        )
    for box in boxes.itertuples():
        width, height = box.right - box.left, box.top - box.bottom
        outline: dict[str, Any] = {"fill": False, "edgecolor": _INK, "linewidth": 0.9}
        ax.add_patch(Rectangle((box.left, box.bottom), width, height, **outline))


def _boxes(data: pd.DataFrame) -> pd.DataFrame:
    groups = data.groupby("matrix")
    return pd.DataFrame(
        {
            "left": groups["left"].min(),
            "right": groups["left"].max() + 1,
            "bottom": groups["bottom"].min(),
            "top": groups["bottom"].max() + 1,
        }
    )


def _label_parts(ax: Axes, boxes: pd.DataFrame) -> None:
    names = {
        "x": "$x$",
        "W_gate": r"$W_{\mathrm{gate}}$",
        "W_up": r"$W_{\mathrm{up}}$",
        "W_down": r"$W_{\mathrm{down}}$",
        "e_k": "$e_k(x)$",
        "E": "$E(x)$",
    }
    for part, name in names.items():
        box = boxes.loc[part]
        above = part != "W_up"
        x = (box["left"] + box["right"]) / 2
        y = box["top"] + 0.45 if above else box["bottom"] - 0.45
        ax.text(x, y, name, ha="center", va="bottom" if above else "top", fontsize=11)
    for part in ("W_gate", "W_up"):
        box = boxes.loc[part]
        _small(ax, box["right"] + 0.6, box["bottom"] + 2, "d_inter", 90)
    gate, down, x = boxes.loc["W_gate"], boxes.loc["W_down"], boxes.loc["x"]
    _small(ax, (gate["left"] + gate["right"]) / 2, 0.0, "d_model")
    _small(ax, down["right"] - 1.8, down["bottom"] - 0.8, "d_inter")
    _small(ax, x["left"] - 0.7, 0.0, "d_model", 90)


def _letter_k(ax: Axes, x: float, y: float) -> None:
    ax.text(x, y, "$k$", fontsize=10, color=ATOM_COLOR, **_CENTRED)


def _small(ax: Axes, x: float, y: float, text: str, rotation: float = 0) -> None:
    look = _CENTRED | {"fontsize": 8, "color": "#777777", "family": "monospace"}
    ax.text(x, y, text, rotation=rotation, **look)


def _draw_flow(ax: Axes, data: pd.DataFrame, boxes: pd.DataFrame) -> None:
    heights = data[data["of_atom"]].groupby("matrix")["bottom"].mean() + 0.5
    gate_y, up_y = heights["W_gate"], heights["W_up"]
    x, down = boxes.loc["x"], boxes.loc["W_down"]
    right = boxes.loc["W_gate", "right"]
    for y, beside in ((gate_y, 1.0), (up_y, -1.0)):
        left = boxes.loc["W_gate", "left"]
        _arrow(ax, (x["right"] + 0.2, 0), (left - 0.2, y))
        _letter_k(ax, left - 0.55, y + beside)
    column = data.loc[data["of_atom"] & data["matrix"].eq("W_down"), "left"].iloc[0]
    _letter_k(ax, column + 0.5, down["bottom"] - 0.8)
    _node(ax, _OPERATOR_X, gate_y, "act")
    _arrow(ax, (right + 0.2, gate_y), (_OPERATOR_X - 1.1, gate_y))
    _node(ax, _PRODUCT_X, 0, "×")
    _arrow(ax, (_OPERATOR_X + 0.8, gate_y - 0.8), (_PRODUCT_X - 0.4, 1.0))
    _arrow(ax, (right + 0.2, up_y), (_PRODUCT_X - 0.4, -1.0))
    _arrow(ax, (_PRODUCT_X + 1.1, 0), (down["left"] - 0.2, 0))
    above = _CENTRED | {"va": "bottom"}
    middle = (_PRODUCT_X + 1.1 + down["left"]) / 2
    ax.text(middle, 0.5, "$h_k$", fontsize=11, color=ATOM_COLOR, **above)
    for before, after, text in (("W_down", "e_k", ""), ("e_k", "E", r"$\sum_k$")):
        start, end = boxes.loc[before, "right"] + 0.2, boxes.loc[after, "left"] - 0.2
        _arrow(ax, (start, 0), (end, 0))
        ax.text((start + end) / 2, 0.5, text, fontsize=10, **above)
    _draw_formulas(ax, boxes)


def _draw_formulas(ax: Axes, boxes: pd.DataFrame) -> None:
    lines = (
        r"$h_k = \mathrm{act}(w_{\mathrm{gate},k}\cdot x)\;(w_{\mathrm{up},k}\cdot x)$",
        r"$e_k(x) = w_{\mathrm{down},k}\,h_k \qquad E(x) = \sum_k e_k(x)$",
    )
    for place, line in enumerate(lines):
        y = boxes.loc["W_up", "bottom"] + 2.4 - 2.1 * place
        ax.text(_PRODUCT_X + 1.2, y, line, fontsize=10, va="center")
    ax.text(
        (boxes.loc["x", "left"] + boxes.loc["E", "right"]) / 2,
        boxes.loc["W_up", "bottom"] - 3.4,
        r"atomic expert $k$  =  row $k$ of $W_{\mathrm{gate}}$  +  "
        r"row $k$ of $W_{\mathrm{up}}$  +  column $k$ of $W_{\mathrm{down}}$",
        fontsize=11,
        color=ATOM_COLOR,
        **_CENTRED,
    )


def _node(ax: Axes, x: float, y: float, text: str) -> None:
    circle = {
        "boxstyle": "circle,pad=0.3",
        "facecolor": "white",
        "edgecolor": _INK,
        "linewidth": 0.9,
    }
    ax.text(x, y, text, fontsize=9, bbox=circle, **_CENTRED)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    look: dict[str, Any] = {"mutation_scale": 9, "linewidth": 1.1, "color": _INK}
    arrow = FancyArrowPatch(start, end, arrowstyle="-|>", shrinkA=0, shrinkB=0, **look)
    ax.add_patch(arrow)


@styled
def figure_atomic_expert(data: pd.DataFrame | None = None) -> Figure:
    """The picture on a figure of its own."""
    return figure_with(plot_atomic_expert(data))
