"""Attribution of the loss as HTML: pure functions of the results of `evaluation`.

Every value says whether it is *first order* (an estimate) or *measured*. Importing
this needs no torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from heapr_lab.panel.jobs import status
from heapr_lab.panel.passage_html import numbered, rows_html, step_style, visible

if TYPE_CHECKING:
    from heapr_lab.evaluation.restoring import Restored

_N_TOKENS: Final = 40
"""Tokens of the map; the others are summed in one row."""
_SHADES: Final = (0.125, 0.25, 0.5)
"""Shares of the largest value of the map from which a cell has each of the marks."""
_FIRST_ORDER = "first order [nats/token]"


def attribution_html(
    layers: pd.DataFrame,
    tokens: np.ndarray,
    texts: Sequence[str],
    *,
    change: float,
    pruned: str,
) -> str:
    """The first-order shares of the layers, and the map of layers and tokens.

    Shapes: tokens (L, n_layers), in nats per predicted token; texts (L,).

    Args:
        layers: as `Attribution.layers` has them.
        tokens: attribution to what is removed at each token in each layer.
        texts: of the tokens.
        change: the measured Δloss, in nats per token.
        pruned: says which pruned model it is.
    """
    total = layers["first_order"].sum()
    text = (
        f"First order: the shares of all layers add up to {total:+.4f} nats per token; "
        f"measured, Δ is {change:+.4f}. The nearer the two, the better the shares. "
        f"Masked model: {pruned}."
    )
    rows = [
        [f"{row.layer}", f"{row.n_removed:,}", f"{row.first_order:+.4f}"]
        for row in layers.itertuples()
    ]
    names = ["layer", "atoms pruned", _FIRST_ORDER]
    table = rows_html("Share of each layer in Δ, first order", names, rows)
    return f"{status(text)}{table}{_map(layers['layer'].tolist(), tokens, texts)}"


def _map(layers: Sequence[int], tokens: np.ndarray, texts: Sequence[str]) -> str:
    """A row for each of the tokens with most, in the order of the text."""
    chosen = np.sort(np.argsort(-np.abs(tokens).sum(1), kind="stable")[:_N_TOKENS])
    largest = np.abs(tokens).max()
    rows = [
        [f"{place}", visible(texts[place]), *_cells(tokens[place], largest)]
        for place in chosen
    ]
    others = np.delete(tokens, chosen, axis=0)
    if len(others):
        rows.append(["–", f"{len(others)} others", *_cells(others.sum(0), np.inf)])
    caption = (
        f"The {len(chosen)} tokens of {len(texts)} at which most is removed, first "
        "order, in thousandths of a nat per token: + makes the text worse (orange, "
        "solid line), − better (blue, dotted line). What is removed at a token may "
        "raise the loss of any token after it."
    )
    names = ["position", "token", "all layers", *(f"layer {k}" for k in layers)]
    named = 'role="region" tabindex="0" aria-label="attribution by token and layer"'
    table = rows_html(caption, names, rows)
    return f'<div {named} style="overflow:auto;max-height:480px">{table}</div>'


def _cells(values: np.ndarray, largest: float) -> list[str]:
    """The sum, and each value, marked by its share of `largest`."""
    return [f"{1000 * values.sum():+.2f}", *(_cell(own, largest) for own in values)]


def _cell(value: float, largest: float) -> str:
    step = sum(abs(value) >= share * largest > 0 for share in _SHADES)
    style = step_style(step, worse=value > 0)
    return f'<span style="{style}">{1000 * value:+.2f}</span>'


def measured_html(found: "Restored", *, first_order: np.ndarray, pruned: str) -> str:
    """What restoring each part gains and what its removal alone costs, measured.

    Args:
        found: the losses.
        first_order: the estimate for each row of its frame.
        pruned: says which pruned model it is.
    """
    of_experts = "expert" in found.frame
    part = "expert" if of_experts else "layer"
    where = f" in layer {found.frame['layer'].iloc[0]}" if of_experts else ""
    text = (
        f"Measured: Δ is {found.delta_nll:+.4f} nats per token when all is pruned. "
        f"Each {part}{where} was restored alone, and pruned alone. Parts interact, so "
        f"neither column adds up to Δ. Masked model: {pruned}."
    )
    rows = [
        [
            f"{getattr(row, part)}",
            f"{row.n_removed:,}",
            f"{estimate:+.4f}",
            f"{found.delta_nll - row.restored_delta:+.4f}",
            f"{row.restored_delta:+.4f}",
            f"{row.alone_delta:+.4f}",
        ]
        for row, estimate in zip(found.frame.itertuples(), first_order, strict=True)
    ]
    names = [
        part,
        "atoms pruned",
        _FIRST_ORDER,
        "measured: restoring it gains",
        "measured: Δ with it restored",
        "measured: Δ with only it pruned",
    ]
    return f"{status(text)}{rows_html(f'Each {part}{where}', names, rows)}"


def token_html(
    atoms: pd.DataFrame,
    texts: Sequence[str],
    *,
    layer: int,
    position: int,
    n: int,
    pruned: str,
) -> str:
    """The pruned experts and atoms of one token in one layer, first order.

    Args:
        atoms: as `attribution.attribute_token` has them.
        texts: of all tokens, (L,).
        layer: number of the layer.
        position: of the token.
        n: atoms to show.
        pruned: says which pruned model it is.
    """
    total = atoms["first_order"].sum()
    text = (
        f"Layer {layer}, position {position}: what is pruned of the token's experts "
        f"adds {1000 * total:+.3f} thousandths of a nat per token to the loss of the "
        f"text, first order. Masked model: {pruned}."
    )
    shown = atoms.head(n)
    rows = [
        [f"{row.expert}", f"{row.atom}", f"{row.p:.4f}", f"{row.h:+.4g}", _milli(row)]
        for row in shown.itertuples()
    ]
    names = ["expert", "atom", "routing weight p", "activation h", _MILLI]
    caption = f"The {len(rows)} of {len(atoms)} pruned atoms with most"
    return (
        f"{status(text)}{numbered(texts, position)}{_experts(atoms)}"
        f"{rows_html(caption, names, rows)}"
    )


_MILLI = "first order [0.001 nats/token]"


def _milli(row: Any) -> str:
    return f"{1000 * row.first_order:+.3f}"


def _experts(atoms: pd.DataFrame) -> str:
    groups = atoms.groupby("expert", sort=False).agg(
        n=("atom", "size"), p=("p", "first"), first_order=("first_order", "sum")
    )
    order = groups.sort_values("first_order", key=np.abs, ascending=False)
    rows = [
        [f"{row.Index}", f"{row.p:.4f}", f"{row.n}", _milli(row)]
        for row in order.itertuples()
    ]
    names = ["expert", "routing weight p", "atoms pruned", _MILLI]
    return rows_html("Experts of the token that lose atoms", names, rows)
