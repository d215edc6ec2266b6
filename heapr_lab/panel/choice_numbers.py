"""The numbers of a selection: sizes, savings, and measured losses."""

import html
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.panel.looks import MEASURED, badge
from heapr_lab.panel.session import NotKnownError, PruningSession
from heapr_lab.pruning.savings import at_context

Row: TypeAlias = tuple[str, str, str, str]
"""What is counted, of the dense model, of the pruned one, and the share saved."""
_HEADS: Row = ("", "dense", "pruned", "saved")


def numbers_of(session: PruningSession) -> list[Row]:
    """Sizes, savings, and measured losses; "" where there is no number."""
    return [*_sizes(session), *_losses(session)]


def numbers_html(rows: Sequence[Row]) -> str:
    """The numbers as an HTML table."""
    head = "".join(f'<th style="text-align:right">{name}</th>' for name in _HEADS)
    body = "".join(_table_row(*row) for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def numbers_text(rows: Sequence[Row]) -> str:
    """The numbers as plain text, a line for each.

    Example:
        >>> numbers_text([("atomic experts", "16", "8", "50.0%")])
        'atomic experts: dense 16, pruned 8, saved 50.0%'
    """
    return "\n".join(f"{row[0]}: {_cells_text(row)}" for row in rows)


def _cells_text(row: Row) -> str:
    named = zip(_HEADS[1:], row[1:], strict=True)
    return ", ".join(f"{head} {cell}" for head, cell in named if cell)


def _sizes(session: PruningSession) -> Iterator[Row]:
    try:
        keep = session.keep
    except NotKnownError:
        return
    yield _counted("atomic experts", keep.n_atoms, keep.n_kept)
    saved = session.savings()
    if saved is None:
        return
    row = saved.iloc[0]
    yield _counted("parameters", row.parameters_before, row.parameters_after)
    kind = f"bytes ({session.bytes_are()})"
    yield _counted(kind, row.bytes_before, row.bytes_after)
    flops = f"FLOPs per token, {at_context(row.seq_len)}"
    yield _counted(flops, row.flops_before, row.flops_after)
    yield "FLOPs of the routed experts", "", "", f"{row.routed_flops_reduction:.1%}"


def _losses(session: PruningSession) -> Iterator[Row]:
    for point in session.measured().to_dict("records"):
        loss, of = point["delta_nll"], f"on {point['dataset']}"
        with np.errstate(over="ignore"):
            dense, pruned = np.exp([point["nll"] - loss, point["nll"]])
        yield f"{MEASURED} perplexity {of}", f"{dense:,.1f}", f"{pruned:,.1f}", ""
        yield f"{MEASURED} Δloss {of} [{PER_TOKEN}]", "", f"{loss:.3g}", ""


def _counted(name: str, before: float, after: float) -> Row:
    return name, f"{before:,.0f}", f"{after:,.0f}", f"{1 - after / before:.1%}"


def _table_row(name: str, *cells: str) -> str:
    right = "text-align:right;padding:0 8px;font-variant-numeric:tabular-nums"
    values = "".join(f'<td style="{right}">{html.escape(cell)}</td>' for cell in cells)
    return f'<tr><th style="text-align:left">{_name_html(name)}</th>{values}</tr>'


def _name_html(name: str) -> str:
    """The name, whose first word is a badge if it says that the number is measured."""
    if name.startswith(f"{MEASURED} "):
        return f"{badge()} {html.escape(name.removeprefix(f'{MEASURED} '))}"
    return html.escape(name)
