"""The inspection of one text as HTML: pure functions of the frames of `inspection`.

Colours follow JupyterLab's theme, and are never the only mark. Importing this needs no
torch.
"""

import html
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from heapr_lab.panel.looks import BORDER, INK, MUTED, columns_html, numbers, status

_STEPS: Final = (0.1, 0.5, 2.0)
"""Changes of the loss, in nats, from which a token has each of the three marks."""
_WORSE, _BETTER = "213,94,0", "38,139,210"
"""Orange and blue, which are distinct for colour-blind people, on light and dark."""
_OPACITY = (0.18, 0.36, 0.6)
_CODE = "font-family:var(--jp-code-font-family, monospace);white-space:pre-wrap"
_N_HURT: Final = 10
_N_AROUND: Final = 6
_N_TOKENS: Final = 40
"""Tokens of the map; the others are summed in one row."""
_SHADES: Final = (0.125, 0.25, 0.5)
"""Shares of the largest value of the map from which a cell has each of the marks."""
_FIRST_ORDER = "first order [nats/token]"


def left_out_html(n_tokens: int, part: str) -> str:
    """A line about the tokens of a text, at its `part`, that were not read."""
    if not n_tokens:
        return ""
    return status(
        f"The text is too long to be read whole: {n_tokens} tokens at its {part} are "
        "left out."
    )


# --- views: pieces ----------------------------------------------------------------


def _visible(text: str, *, break_: str = "") -> str:
    """Escaped text with visible line breaks; `break_` follows a ↵."""
    return html.escape(text).replace("\n", f"↵{break_}") if text else "▯"


def _mark(text: str, title: str) -> str:
    """A token that is marked, by a frame and in bold."""
    style = f"background:none;color:inherit;border:2px solid rgb({_WORSE})"
    return (
        f'<mark style="{style};border-radius:3px" title="{html.escape(title)}">'
        f"<b>{_visible(text)}</b></mark>"
    )


def _in_place(before: str, token: str) -> str:
    """A marked token in one line with the text before it."""
    around = _visible(before) if before else ""
    return f'<span style="{_CODE}">{around}{_mark(token, "the token")}</span>'


# --- views: losses ----------------------------------------------------------------


def losses_html(losses: pd.DataFrame, *, pruned: str) -> str:
    """A text coloured by the change of each token's loss, with totals and the worst.

    Args:
        losses: as `passages.token_losses` has them.
        pruned: says which pruned model it is.
    """
    tokens = "".join(_loss_token(row) for row in losses.itertuples())
    return (
        f"{status(_totals(losses, pruned))}"
        f'<div style="color:{MUTED};margin:6px 0">{_legend()}</div>'
        f'<div style="{_CODE};color:{INK};line-height:2;padding:6px 10px;'
        f'border:1px solid {BORDER};border-radius:4px">{tokens}</div>'
        f"{_hurt_most(losses)}"
    )


def _totals(losses: pd.DataFrame, pruned: str) -> str:
    dense, after = losses["dense_nll"].mean(), losses["pruned_nll"].mean()
    change = losses["delta_nll"]
    with np.errstate(over="ignore"):
        perplexities = f"{np.exp(dense):,.1f} → {np.exp(after):,.1f}"
    return (
        f"Dense {dense:.3f}, pruned {after:.3f}, Δ {after - dense:+.3f} nats per token "
        f"over {change.count()} predicted tokens (perplexity {perplexities}). By "
        f"{_STEPS[1]:g} nats or more, {(change >= _STEPS[1]).sum()} of them are worse "
        f"and {(change <= -_STEPS[1]).sum()} better. Pruned model: {pruned}."
    )


def _loss_token(row: Any) -> str:
    title = (
        f"position {row.position}: Δ {row.delta_nll:+.2f} nats "
        f"(dense {row.dense_nll:.2f}, pruned {row.pruned_nll:.2f})"
    )
    if np.isnan(row.delta_nll):
        title = "no loss: it is the first token"
    style, text = _style(row.delta_nll, _STEPS), _visible(row.token, break_="\n")
    return f'<span style="{style}" title="{title}">{text}</span>'


def _style(value: float, steps: Sequence[float]) -> str:
    """Background and underline, stronger with every step; none below the first."""
    step = sum(abs(value) >= least > 0 for least in steps)
    if not step:
        return ""
    color, line = (_WORSE, "solid") if value > 0 else (_BETTER, "dotted")
    return (
        f"background:rgba({color},{_OPACITY[step - 1]});"
        f"border-bottom:{step}px {line} rgb({color});margin-right:1px"
    )


def _legend() -> str:
    def samples(sign: int) -> str:
        return " ".join(
            f'<span style="{_style(sign * step, _STEPS)};color:{INK};padding:0 4px">'
            f"{sign * step:+g}</span>"
            for step in _STEPS
        )

    return (
        f"Δ nats, from: worse {samples(1)} (orange, solid line), better {samples(-1)} "
        "(blue, dotted line). Point at a token to see its losses."
    )


def _hurt_most(losses: pd.DataFrame) -> str:
    worst = losses[losses["delta_nll"] > 0].nlargest(_N_HURT, "delta_nll")
    if worst.empty:
        return "<p>No token has a higher loss.</p>"
    tokens = losses["token"].tolist()
    places = [
        _in_place("".join(tokens[max(0, at - _N_AROUND) : at]), tokens[at])
        for at in worst["position"]
    ]
    columns = {
        "position": worst["position"],
        "Δ [nats]": numbers(worst["delta_nll"], "+.3f"),
        "dense [nats]": numbers(worst["dense_nll"], ".3f"),
        "pruned [nats]": numbers(worst["pruned_nll"], ".3f"),
        "token, in place": places,
    }
    return columns_html(f"The {len(worst)} tokens hurt most", columns)


# --- views: continuations ---------------------------------------------------------


def continuations_html(
    prompt: str, dense: pd.DataFrame, pruned_frame: pd.DataFrame, *, pruned: str
) -> str:
    """The continuations of `prompt` by the dense and the pruned model, side by side.

    Args:
        prompt: the prompt of both.
        dense: that of the dense model, as `passages.continue_text` has it.
        pruned_frame: that of the pruned model.
        pruned: says which pruned model it is.
    """
    first = _first_difference(dense, pruned_frame)
    if first is None:
        text = f"Both models write the same {len(dense)} tokens."
    else:
        text = f"The same for {first} tokens; the first that differs is framed."
    columns = _continuation("Dense model", prompt, dense, first)
    columns += _continuation(f"Pruned model: {pruned}", prompt, pruned_frame, first)
    return (
        f"{status(text)}"
        f'<div style="display:flex;flex-wrap:wrap;gap:12px">{columns}</div>'
    )


def _first_difference(dense: pd.DataFrame, pruned: pd.DataFrame) -> int | None:
    """The first step at which the two differ or one has ended; None if they agree."""
    ids = dense["token_id"].tolist(), pruned["token_id"].tolist()
    if ids[0] == ids[1]:
        return None
    pairs = zip(*ids, strict=False)
    differing = (step for step, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(map(len, ids)))


def _continuation(
    name: str, prompt: str, frame: pd.DataFrame, first: int | None
) -> str:
    """One column; if this model ended before the other, it says so."""
    texts = [_visible(text, break_="\n") for text in frame["token"]]
    if first is not None and first < len(texts):
        texts[first] = _mark(frame["token"].iloc[first], "the first that differs")
    elif first is not None:
        texts.append(f'<i style="color:{MUTED}">(ends here)</i>')
    box = f"border:1px solid {BORDER};border-radius:4px;padding:6px 10px"
    return (
        f'<div style="flex:1 1 300px;min-width:0;color:{INK};{box}">'
        f"<strong>{html.escape(name)}</strong>"
        f'<div style="{_CODE};overflow-wrap:anywhere;line-height:1.6">'
        f'<span style="color:{MUTED}">{html.escape(prompt)}</span>{"".join(texts)}'
        "</div></div>"
    )


# --- views: why the loss changes, to first order ------------------------------------


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
        texts: the texts of the tokens.
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
        [f"{place}", _visible(texts[place]), *_shades(tokens[place], largest)]
        for place in chosen
    ]
    others = np.delete(tokens, chosen, axis=0)
    if len(others):
        rows.append(["–", f"{len(others)} others", *_shades(others.sum(0), np.inf)])
    caption = (
        f"The {len(chosen)} tokens of {len(texts)} at which most is removed, first "
        "order, in thousandths of a nat per token: + makes the text worse (orange, "
        "solid line), − better (blue, dotted line). What is removed at a token may "
        "raise the loss of any token after it."
    )
    names = ["position", "token", "all layers", *(f"layer {k}" for k in layers)]
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    table = columns_html(caption, columns)
    return (  # the box scrolls, also with the keyboard
        '<div role="region" tabindex="0" aria-label="attribution by token and layer" '
        f'style="max-height:480px;overflow:auto">{table}</div>'
    )


def _shades(values: np.ndarray, largest: float) -> list[str]:
    """The sum, and each value, marked by its share of `largest`."""
    steps = [share * largest for share in _SHADES]
    return [f"{1000 * values.sum():+.2f}"] + [
        f'<span style="{_style(nats, steps)}">{1000 * nats:+.2f}</span>'
        for nats in values
    ]
