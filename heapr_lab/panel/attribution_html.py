"""Attribution of the loss as HTML: pure functions of the results of `evaluation`.

Every value says whether it is *first order* (an estimate) or *measured*. Importing
this needs no torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pandas as pd

from heapr_lab.panel.jobs import status
from heapr_lab.panel.passage_html import (
    columns_html,
    numbered,
    numbers,
    step_style,
    visible,
)

if TYPE_CHECKING:
    from heapr_lab.inspection.restoring import Restored

_N_TOKENS: Final = 40
"""Tokens of the map; the others are summed in one row."""
_SHADES: Final = (0.125, 0.25, 0.5)
"""Shares of the largest value of the map from which a cell has each of the marks."""
_FIRST_ORDER = "first order [nats/token]"
_MILLI = "first order [0.001 nats/token]"


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
    columns = {
        "layer": layers["layer"],
        "atoms pruned": numbers(layers["n_removed"], ","),
        _FIRST_ORDER: numbers(layers["first_order"], "+.4f"),
    }
    table = columns_html("Share of each layer in Δ, first order", columns)
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
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    named = 'role="region" tabindex="0" aria-label="attribution by token and layer"'
    table = columns_html(caption, columns)
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
    restored, alone = found.frame["restored_delta"], found.frame["alone_delta"]
    columns = {
        part: found.frame[part],
        "atoms pruned": numbers(found.frame["n_removed"], ","),
        _FIRST_ORDER: numbers(first_order, "+.4f"),
        "measured: restoring it gains": numbers(found.delta_nll - restored, "+.4f"),
        "measured: Δ with it restored": numbers(restored, "+.4f"),
        "measured: Δ with only it pruned": numbers(alone, "+.4f"),
    }
    return f"{status(text)}{columns_html(f'Each {part}{where}', columns)}"


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
    columns = {
        "expert": shown["expert"],
        "atom": shown["atom"],
        "routing weight p": numbers(shown["p"], ".4f"),
        "activation h": numbers(shown["h"], "+.4g"),
        _MILLI: numbers(1000 * shown["first_order"], "+.3f"),
    }
    caption = f"The {len(shown)} of {len(atoms)} pruned atoms with most"
    return (
        f"{status(text)}{numbered(texts, position)}{_experts(atoms)}"
        f"{columns_html(caption, columns)}"
    )


def _experts(atoms: pd.DataFrame) -> str:
    groups = atoms.groupby("expert", sort=False).agg(
        n=("atom", "size"), p=("p", "first"), first_order=("first_order", "sum")
    )
    order = groups.sort_values("first_order", key=np.abs, ascending=False)
    columns = {
        "expert": order.index,
        "routing weight p": numbers(order["p"], ".4f"),
        "atoms pruned": order["n"],
        _MILLI: numbers(1000 * order["first_order"], "+.3f"),
    }
    return columns_html("Experts of the token that lose atoms", columns)
