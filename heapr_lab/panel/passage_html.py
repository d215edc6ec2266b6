"""The inspection of one text as HTML: pure functions of the frames of `evaluation`.

Colours follow JupyterLab's theme, and are never the only mark. Importing this needs no
torch.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from heapr_lab.panel.jobs import status
from heapr_lab.pruning.masks import KeepMask

_STEPS: Final = (0.1, 0.5, 2.0)
"""Changes of the loss, in nats, from which a token has each of the three marks."""
_WORSE, _BETTER = "213,94,0", "38,139,210"
"""Orange and blue, which are distinct for colour-blind people, on light and dark."""
_OPACITY = (0.18, 0.36, 0.6)
_MUTED = "var(--jp-ui-font-color2, #555)"
_INK = "var(--jp-ui-font-color1, #111)"
_BORDER = "var(--jp-border-color2, #bbb)"
_CODE = "font-family:var(--jp-code-font-family, monospace);white-space:pre-wrap"
_N_HURT: Final = 10
_N_AROUND: Final = 6


def table_html(frame: pd.DataFrame) -> str:
    """`frame` with four decimals and space between its columns; wide ones scroll."""
    text: str = frame.to_html(
        index=False, border=0, float_format="{:.4f}".format, na_rep="–"
    )
    for cell in ("th", "td"):
        text = text.replace(f"<{cell}>", f'<{cell} style="padding:0 8px">')
    return f'<div style="overflow-x:auto">{text}</div>'


def left_out_html(n_tokens: int, part: str) -> str:
    """A line about the tokens of a text, at its `part`, that were not read."""
    if not n_tokens:
        return ""
    return status(
        f"The text is too long to be read whole: {n_tokens} tokens at its {part} are "
        "left out."
    )


# --- views: pieces ----------------------------------------------------------------


def visible(text: str, *, break_: str = "") -> str:
    """Escaped text with visible line breaks; `break_` follows a ↵."""
    return html.escape(text).replace("\n", f"↵{break_}") if text else "▯"


def _mark(text: str, title: str) -> str:
    """A token that is marked, by a frame and in bold."""
    style = f"background:none;color:inherit;border:2px solid rgb({_WORSE})"
    return (
        f'<mark style="{style};border-radius:3px" title="{html.escape(title)}">'
        f"<b>{visible(text)}</b></mark>"
    )


def rows_html(caption: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML."""
    cell = f"text-align:left;padding:2px 12px 2px 0;border-bottom:1px solid {_BORDER}"
    head = "".join(
        f'<th scope="col" style="{cell};vertical-align:bottom">{html.escape(name)}</th>'
        for name in names
    )
    body = "".join(
        "<tr>" + "".join(f'<td style="{cell}">{value}</td>' for value in row) + "</tr>"
        for row in rows
    )
    style = f"border-collapse:collapse;color:{_INK};line-height:1.5;margin:8px 0"
    return (
        f'<table style="{style};font-variant-numeric:tabular-nums">'
        f'<caption style="text-align:left;color:{_MUTED}">{html.escape(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _in_place(before: str, token: str, after: str = "") -> str:
    """A marked token in one line with its context."""
    around = [visible(text) if text else "" for text in (before, after)]
    marked = _mark(token, "the token")
    return f'<span style="{_CODE}">{around[0]}{marked}{around[1]}</span>'


def _bar(share: float) -> str:
    """A share as a number and as a bar."""
    width = 60 * min(1.0, max(0.0, share))
    return (
        f'{share:.1%} <span aria-hidden="true" style="display:inline-block;height:8px;'
        f'width:{width:.0f}px;background:rgb({_BETTER})"></span>'
    )


def _kept(kept: bool) -> str:
    if kept:
        return "✓ kept"
    return f'<b style="border-bottom:2px solid rgb({_WORSE})">✗ pruned</b>'


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
        f'<div style="color:{_MUTED};margin:6px 0">{_legend()}</div>'
        f'<div style="{_CODE};color:{_INK};line-height:2;padding:6px 10px;'
        f'border:1px solid {_BORDER};border-radius:4px">{tokens}</div>'
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
    if np.isnan(row.delta_nll):
        title, style = "no loss: it is the first token", ""
    else:
        title = (
            f"position {row.position}: Δ {row.delta_nll:+.2f} nats "
            f"(dense {row.dense_nll:.2f}, pruned {row.pruned_nll:.2f})"
        )
        style = _loss_style(row.delta_nll)
    text = visible(row.token, break_="\n")
    return f'<span style="{style}" title="{title}">{text}</span>'


def _loss_style(change: float) -> str:
    """Background and underline, stronger with every step; none below the first."""
    step = sum(abs(change) >= least for least in _STEPS)
    return step_style(step, worse=change > 0)


def step_style(step: int, *, worse: bool) -> str:
    """Background and underline of one of three steps; none at 0."""
    if not step:
        return ""
    color, line = (_WORSE, "solid") if worse else (_BETTER, "dotted")
    return (
        f"background:rgba({color},{_OPACITY[step - 1]});"
        f"border-bottom:{step}px {line} rgb({color});margin-right:1px"
    )


def _legend() -> str:
    def samples(sign: int) -> str:
        return " ".join(
            f'<span style="{_loss_style(sign * step)};color:{_INK};padding:0 4px">'
            f"{sign * step:+g}</span>"
            for step in _STEPS
        )

    return (
        f"Δ nats, from: worse {samples(1)} (orange, solid line), better {samples(-1)} "
        "(blue, dotted line). Point at a token to see its losses."
    )


def _hurt_most(losses: pd.DataFrame) -> str:
    worst = losses[losses["delta_nll"] > 0].nlargest(_N_HURT, "delta_nll")
    rows = []
    for row in worst.itertuples():
        around = losses["token"].iloc[max(0, row.position - _N_AROUND) : row.position]
        text = _in_place("".join(around), row.token)
        numbers = f"{row.delta_nll:+.3f}", f"{row.dense_nll:.3f}"
        rows.append([f"{row.position}", *numbers, f"{row.pruned_nll:.3f}", text])
    if not rows:
        return "<p>No token has a higher loss.</p>"
    names = ["position", "Δ [nats]", "dense [nats]", "pruned [nats]", "token, in place"]
    return rows_html(f"The {len(rows)} tokens hurt most", names, rows)


# --- views: continuations ---------------------------------------------------------


def continuations_html(
    prompt: str, dense: pd.DataFrame, pruned_frame: pd.DataFrame, *, pruned: str
) -> str:
    """The continuations of `prompt` by the dense and the pruned model, side by side.

    Args:
        prompt: of both.
        dense: of the dense model, as `passages.continue_text` has it.
        pruned_frame: of the pruned model.
        pruned: says which pruned model it is.
    """
    first = _first_difference(dense, pruned_frame)
    if first is None:
        text = f"Both models write the same {len(dense)} tokens."
    else:
        text = f"The same for {first} tokens; the first that differs is framed."
    columns = [
        _continuation(name, prompt, frame, first)
        for name, frame in (("Dense model", dense), (f"Masked: {pruned}", pruned_frame))
    ]
    return (
        f"{status(text)}"
        f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(columns)}</div>'
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
    texts = [visible(text, break_="\n") for text in frame["token"]]
    if first is not None and first < len(texts):
        texts[first] = _mark(frame["token"].iloc[first], "the first that differs")
    elif first is not None:
        texts.append(f'<i style="color:{_MUTED}">(ends here)</i>')
    box = f"border:1px solid {_BORDER};border-radius:4px;padding:6px 10px"
    return (
        f'<div style="flex:1 1 300px;min-width:0;color:{_INK};{box}">'
        f"<strong>{html.escape(name)}</strong>"
        f'<div style="{_CODE};overflow-wrap:anywhere;line-height:1.6">'
        f'<span style="color:{_MUTED}">{html.escape(prompt)}</span>{"".join(texts)}'
        "</div></div>"
    )


# --- views: routing ---------------------------------------------------------------


def routing_html(
    routes: pd.DataFrame,
    atoms: pd.DataFrame,
    *,
    keep: KeepMask,
    layer: int,
    position: int,
    pruned: str,
) -> str:
    """What serves one token: experts and atoms in one layer, experts in all.

    Args:
        routes: of the whole text, as `routing.routing` has them.
        atoms: of this token and layer, as `activations.atoms_of_token` has them.
        keep: the mask of the pruned model.
        layer: number of the layer.
        position: of the token.
        pruned: says which pruned model it is.
    """
    own = routes[routes["layer"].eq(layer)]
    kept = keep.by_layer(layer)
    experts = own[own["position"].eq(position)]
    texts = own.drop_duplicates("position")["token"].tolist()
    lost = experts["p"] @ (1 - kept[experts["expert"]].mean(1))
    text = (
        f"Layer {layer}, position {position}: {len(experts)} experts serve the token. "
        f"Weighted by the router, {lost / experts['p'].sum():.1%} of their atoms are "
        f"pruned. Masked model: {pruned}."
    )
    return (
        f"{status(text)}{numbered(texts, position)}"
        f"{_experts_table(experts, kept)}{_atoms_table(atoms, kept)}"
        f"{_layers_table(routes[routes['position'].eq(position)], keep)}"
    )


def numbered(texts: Sequence[str], chosen: int) -> str:
    """The text with the position of every tenth token, and one token marked."""
    parts = []
    for number, text in enumerate(texts):
        if number % 10 == 0:
            parts.append(f'<sub style="color:{_MUTED}">{number}</sub>')
        if number == chosen:
            parts.append(_mark(text, f"position {number}"))
        else:
            style = f"border-right:1px solid {_BORDER}"
            name = f'title="position {number}"'
            parts.append(f'<span style="{style}" {name}>{visible(text)}</span>')
    return (
        f'<div style="{_CODE};color:{_INK};margin:6px 0;overflow-wrap:anywhere">'
        f"{''.join(parts)}</div>"
        f'<div style="color:{_MUTED}">The framed token is the selected one; small '
        "numbers are the position of the next token.</div>"
    )


def _experts_table(experts: pd.DataFrame, kept: np.ndarray) -> str:
    rows = []
    for row in experts.itertuples():
        atoms = kept[row.expert]
        rows.append(
            [
                f"{row.expert}",
                f"{row.p:.4f}",
                _bar(atoms.mean()),
                f"{atoms.sum()} of {atoms.size}",
            ]
        )
    names = ["expert", "routing weight p", "share of its atoms kept", "atoms kept"]
    return rows_html("Experts that serve the token", names, rows)


def _atoms_table(atoms: pd.DataFrame, kept: np.ndarray) -> str:
    rows = [
        [
            f"{row.expert}",
            f"{row.atom}",
            f"{row.h:+.4g}",
            f"{row.contribution:.4g}",
            f"{row.share:.1%}",
            _kept(kept[row.expert, row.atom]),
        ]
        for row in atoms.itertuples()
    ]
    names = ["expert", "atom", "activation h", "|p·h|·‖w_down‖", "share of all", "mask"]
    return rows_html(f"The {len(rows)} atoms that add most to the output", names, rows)


def _layers_table(routes: pd.DataFrame, keep: KeepMask) -> str:
    """The way of one token through all layers."""
    rows = []
    for layer, experts in routes.groupby("layer"):
        shares = keep.by_layer(int(layer))[experts["expert"]].mean(1)
        lost = experts["p"] @ (1 - shares) / experts["p"].sum()
        each = zip(experts["expert"], experts["p"], shares, strict=True)
        served = [
            f"{expert} (p {p:.2f}, {share:.0%} kept)" for expert, p, share in each
        ]
        rows.append([f"{layer}", ", ".join(served), _bar(1 - lost)])
    names = ["layer", "experts that serve the token", "share of their atoms kept"]
    return rows_html("The token in all layers, weighted by the router", names, rows)


# --- views: an atom ---------------------------------------------------------------


def companions_html(atoms: pd.DataFrame, kept: np.ndarray, *, layer: int) -> str:
    """The atoms that fire where one atom is most active; nothing if it never is.

    Args:
        atoms: as `activations.atoms_at_tokens` has them.
        kept: whether each atom of the layer is kept, (experts, atoms).
        layer: that they are in.
    """
    if atoms.empty:
        return ""
    rows = [
        [
            f"{row.expert}",
            f"{row.atom}",
            f"{row.n_tokens}",
            f"{row.share:.1%}",
            _kept(kept[row.expert, row.atom]),
        ]
        for row in atoms.itertuples()
    ]
    names = ["expert", "atom", "tokens in its expert", "mean share of all", "mask"]
    caption = (
        f"The {len(rows)} atoms of layer {layer} that add most to its output at these "
        "tokens"
    )
    return rows_html(caption, names, rows)


def contexts_html(contexts: pd.DataFrame, *, summary: str) -> str:
    """The tokens that activate an atom, or an expert, most, in their contexts.

    Args:
        contexts: as `activations.top_contexts` has them.
        summary: which atom or expert it is, and whether it is pruned.
    """
    if contexts.empty:
        return status(f"{summary} No token of these windows is routed to its expert.")
    of_atom = "h" in contexts
    rows = [
        [
            *([f"{row.h:+.4g}"] if of_atom else []),
            f"{row.p:.3f}",
            f"{row.window}:{row.position}",
            _in_place(row.before, row.token, row.after),
        ]
        for row in contexts.itertuples()
    ]
    names = ["routing weight p", "window:position", "context"]
    names = ["activation h", *names] if of_atom else names
    caption = f"The {len(rows)} tokens at which {'|h|' if of_atom else 'p'} is largest"
    return f"{status(summary)}{rows_html(caption, names, rows)}"
