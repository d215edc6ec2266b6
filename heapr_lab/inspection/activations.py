"""What serves a token, and what atoms respond to: routes, atoms, and contexts.

Shapes: I d_inter; n routed rows of a call, sorted by expert.
Letters: h atom activation, p routing weight, w_down column of W_down. Atom k adds
p · h_k · w_down_k to the output of its layer for a token.
"""

import functools
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import one_of, whole_number
from heapr_lab.inspection.passages import (
    Passage,
    as_float64,
    check_position,
    observe,
    token_texts,
)
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import Routed, observed
from heapr_lab.progress import Parts, Progress
from heapr_lab.refinement.expert_calls import watched
from heapr_lab.text.calibration import CalibrationSet

TOKENS_AT_ONCE = 4096


def routing(model: nn.Module, passage: Passage) -> pd.DataFrame:
    """The experts that each token of a text is routed to, in every layer.

    Args:
        model: the dense model.
        passage: the text, of at least two tokens.

    Returns:
        Columns layer, position, token, expert, p: for each token of each layer the
        routing weights of its experts, largest first.

    Raises:
        SpecError: the text has only one token.
    """
    layers = find_experts(model)
    frames: list[pd.DataFrame] = []
    observers = [functools.partial(_note, frames, layer.layer) for layer in layers]
    observe(model, passage, layers, observers)
    frame = pd.concat(frames)
    texts = [passage.tokens[position] for position in frame["position"]]
    frame.insert(2, "token", texts)
    order = ["layer", "position", "p", "expert"]
    return frame.sort_values(
        order, ascending=[True, True, False, True], ignore_index=True
    )


def _note(frames: list[pd.DataFrame], layer: int, call: Routed) -> None:
    """Note the expert of each routed row, and its routing weight."""
    columns = {
        "layer": layer,
        "position": call.rows.cpu(),
        "expert": call.experts,
        "p": as_float64(call.p),
    }
    frames.append(pd.DataFrame(columns))


# --- atoms ------------------------------------------------------------------------


def atoms_of_token(
    model: nn.Module, passage: Passage, *, layer: int, position: int, n: int = 20
) -> pd.DataFrame:
    """The atoms that add most to a layer's output for one token of a text.

    The contribution of atom k has the length |p · h_k| · ‖w_down_k‖. Lengths do not add
    up, because vectors may cancel; where a family normalises the outputs of its
    experts, it is the length before the normalisation.

    Args:
        model: the dense model.
        passage: the text, of at least two tokens.
        layer: index of a MoE layer.
        position: index of the token, from 0.
        n: number of atoms to return.

    Returns:
        Columns expert, atom, h, p, w_down_norm, contribution (the length), share (of
        the summed lengths of all atoms of the token's experts); largest first.

    Raises:
        SpecError: there is no such layer or position, or the text has only one token.
    """
    chosen = _layer_of(model, layer)
    check_position(position, len(passage.tokens))
    frames: list[pd.DataFrame] = []

    def see(call: Routed) -> None:
        rows = (call.rows == position).nonzero()[:, 0].tolist()
        frames.extend(_atoms(chosen, call, row) for row in rows)

    observe(model, passage, [chosen], [see])
    frame = pd.concat(frames)
    frame["contribution"] = (frame["p"] * frame["h"]).abs() * frame["w_down_norm"]
    frame["share"] = frame["contribution"] / frame["contribution"].sum()
    order = ["contribution", "expert", "atom"]
    frame = frame.sort_values(order, ascending=[False, True, True], ignore_index=True)
    return frame.head(n)


def _atoms(layer: ExpertsLayer, call: Routed, row: int) -> pd.DataFrame:
    """The atoms of the expert of a row."""
    expert = int(call.experts[row])
    W_down = as_float64(layer.down[expert])
    return pd.DataFrame(
        {
            "expert": expert,
            "atom": range(layer.d_inter),
            "h": as_float64(call.h[row]),
            "p": float(call.p[row]),
            "w_down_norm": np.linalg.norm(W_down, axis=0),
        }
    )


def top_contexts(
    model: nn.Module,
    windows: CalibrationSet,
    *,
    tokenizer: Any,
    layer: int,
    expert: int,
    atom: int,
    n: int = 8,
    width: int = 12,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """The tokens at which an atom has its largest |h|, with their contexts.

    One forward pass over `windows`; at most `n` rows are held in memory.

    Args:
        model: the dense model.
        windows: the windows to search.
        tokenizer: its tokenizer.
        layer: index of a MoE layer.
        expert: index of an expert of the layer.
        atom: index of an atom of the expert.
        n: tokens to return; fewer where fewer are routed to the expert.
        width: tokens of context on either side.
        progress: called with (windows done, windows in all).

    Returns:
        Columns window, position, h, p, before, token, after; largest |h| first,
        ties in the order of the text.

    Raises:
        SpecError: there is no such layer, expert or atom, or `n` is not positive.
        CoverageError: the layer did not take part in a forward pass.
    """
    chosen = _layer_of(model, layer)
    for name, number, count in (
        ("expert", expert, chosen.n_experts),
        ("atom", atom, chosen.d_inter),
    ):
        whole_number(number, name=f"{name} in layer {layer}", least=0, most=count - 1)
    whole_number(n, name="n")
    size = max(1, TOKENS_AT_ONCE // windows.seq_len)
    watcher = functools.partial(
        _MostActive, expert=expert, atom=atom, n=n, n_tokens=size * windows.seq_len
    )
    batches = windows.ids.split(size)
    report = Parts(windows.n_sequences, progress).part(windows.n_sequences)
    ((_, top),) = watched(model, batches, [[chosen]], watcher, observed, report)
    places = np.divmod(top.places.numpy(), windows.seq_len)
    rows = [
        (window, position, *_context(tokenizer, windows.ids[window], position, width))
        for window, position in zip(*places, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["window", "position", *_CONTEXT])
    frame.insert(2, "h", as_float64(top.h))
    frame.insert(3, "p", as_float64(top.p))
    return frame


_CONTEXT = ("before", "token", "after")


class _MostActive:
    """Records the n rows with the largest |h| of one atom."""

    def __init__(
        self, _layer: ExpertsLayer, *, expert: int, atom: int, n: int, n_tokens: int
    ) -> None:
        """Nothing is seen yet of batches of `n_tokens`, but for the last one."""
        self.expert, self.atom, self.n, self.n_tokens = expert, atom, n, n_tokens
        self.calls = 0
        self.places = torch.zeros(0, dtype=torch.long)
        self.h = torch.zeros(0, dtype=torch.float64)
        self.p = torch.zeros(0, dtype=torch.float64)

    def __call__(self, call: Routed) -> None:
        """Merge the rows of one batch."""
        start = sum(call.tokens[: self.expert])
        block = slice(start, start + call.tokens[self.expert])
        active = torch.cat([self.h, call.h[block, self.atom].cpu().double()])
        weights = torch.cat([self.p, call.p[block].cpu().double()])
        first = self.calls * self.n_tokens
        places = torch.cat([self.places, first + call.rows[block].cpu()])
        self.calls += 1
        # Stable, with earlier rows first: ties in the order of the text.
        order = active.abs().sort(descending=True, stable=True).indices[: self.n]
        self.h, self.p, self.places = active[order], weights[order], places[order]

    def finished(self) -> "_MostActive":
        """Itself."""
        return self


def _context(
    tokenizer: Any, ids: torch.Tensor, position: int, width: int
) -> tuple[str, str, str]:
    """The text before a token of a window, the token itself, and the text after."""
    start = max(0, position - width)
    texts = token_texts(tokenizer, ids[start : position + width + 1].tolist())
    here = position - start
    return "".join(texts[:here]), texts[here], "".join(texts[here + 1 :])


def _layer_of(model: nn.Module, layer: int) -> ExpertsLayer:
    layers = {experts.layer: experts for experts in find_experts(model)}
    return layers[one_of(layer, layers, name="MoE layer")]
