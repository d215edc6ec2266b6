"""What a model does with one text, token by token, and what its atoms answer to.

Everything here runs the dense model, save where a mask is given.

Shapes: L tokens of a text; E n_experts, I d_inter, D d_expert; n routed rows of a call,
sorted by expert.
Letters: h atom activation, p routing weight, w_down column of W_down. Atom k adds
p · h_k · w_down_k to the output of its layer for a token.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import StoppingCriteria

from heapr_lab.errors import CoverageError, SpecError
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import observed, switching
from heapr_lab.models.likelihood import final_states, token_nll
from heapr_lab.models.modes import evaluating
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import Downs, masking
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.tokenization import tokenise

Progress = Callable[[int, int], None]
"""Called with (done, in all); what it raises ends the work."""

_TOKENS_AT_ONCE = 4096
_UNFINISHED = "\ufffd"
"""What a decoder writes for the first bytes of a character."""


@dataclass(frozen=True, eq=False)
class Passage:
    """A text as a model reads it."""

    ids: torch.Tensor = field(repr=False)
    """Token ids without special tokens, LongTensor (1, L)."""
    tokens: tuple[str, ...] = field(repr=False)
    """The text of each token, (L,)."""
    n_left_out: int = 0
    """Tokens of the text that are not read, for want of room."""

    @property
    def text(self) -> str:
        """What is read."""
        return "".join(self.tokens)


def read_passage(
    model: nn.Module,
    tokenizer: Any,
    *,
    text: str,
    room: int = 0,
    most: int | None = None,
) -> Passage:
    """`text` in tokens, as far as it fits the model's context.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        text: what to read.
        room: tokens of the context to leave free for a continuation. The end of a text
            that is too long is then kept, else its beginning.
        most: tokens to take for the context where it is longer.

    Raises:
        SpecError: the text is empty, or the context has no such room.
    """
    ids = torch.from_numpy(tokenise(text, tokenizer)).long()
    if not len(ids):
        raise SpecError(f"the text {text!r} has no tokens; write at least one word")
    limits = [found for found in (_context_length(model), most) if found is not None]
    context = min(limits, default=room + len(ids))
    if not 0 <= room < context:
        raise SpecError(
            f"{room} tokens are to be left free, but {context} is what can be read in "
            f"all: ask for at most {context - 1}"
        )
    kept = ids[-(context - room) :] if room else ids[:context]
    texts = token_texts(tokenizer, kept.tolist())
    return Passage(kept[None], tuple(texts), len(ids) - len(kept))


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; together they are the text of all of them.

    A token that ends inside a character has the text "", and the one that completes the
    character has it whole.
    """

    def decode(first: int, last: int) -> str:
        text: str = tokenizer.decode(
            ids[first:last], clean_up_tokenization_spaces=False
        )
        return text

    texts: list[str] = []
    # Some tokenizers drop the space before the first token that they decode, so that
    # each is decoded together with those before it that were last shown.
    before, shown = 0, 0
    for end in range(1, len(ids) + 1):
        old, new = decode(before, shown), decode(before, end)
        if new.endswith(_UNFINISHED) and end < len(ids):
            texts.append("")
            continue
        texts.append(new[len(old) :])
        before, shown = shown, end
    return texts


# --- losses and continuations -----------------------------------------------------


def token_losses(
    model: nn.Module,
    passage: Passage,
    *,
    keep: KeepMask,
    downs: Downs | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """What each token of a text costs the dense and the pruned model.

    Units: nats.

    Args:
        model: the dense model.
        passage: the text, of at least two tokens.
        keep: what stays in the pruned model.
        downs: what stands for W_down in the pruned model.
        progress: called after each of the two forwards.

    Returns:
        Columns position, token, dense_nll, pruned_nll, delta_nll (pruned - dense). The
        losses of the first token, which nothing precedes, are missing.

    Raises:
        SpecError: the text has one token only, or `keep` is of another model.
    """
    _check_length(passage)
    report = progress or _silent
    with evaluating(model):
        dense = _losses(model, passage)
        report(1, 2)
        with masking(model, keep, downs):
            pruned = _losses(model, passage)
        report(2, 2)
    columns = {"dense_nll": dense, "pruned_nll": pruned, "delta_nll": pruned - dense}
    tokens = list(passage.tokens)
    return pd.DataFrame({"position": range(len(tokens)), "token": tokens, **columns})


def _losses(model: nn.Module, passage: Passage) -> np.ndarray:
    """The loss of each token, missing for the first, (L,)."""
    nll = _float64(token_nll(model, passage.ids)[0])
    return np.concatenate([[np.nan], nll])


def continue_text(
    model: nn.Module,
    tokenizer: Any,
    *,
    prompt: Passage,
    n_tokens: int = 40,
    keep: KeepMask | None = None,
    downs: Downs | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """What the model writes after `prompt`, always taking the most probable token.

    Args:
        model: the dense model.
        tokenizer: its tokenizer.
        prompt: read with `room` for `n_tokens`.
        n_tokens: tokens to write; fewer are, where the model ends its text.
        keep: what stays of the model; all of it by default.
        downs: what stands for W_down, where `keep` is given.
        progress: called after each token.

    Returns:
        Columns step, token_id, token.

    Raises:
        SpecError: `n_tokens` is not positive, or `keep` is of another model.
    """
    if n_tokens < 1:
        raise SpecError(f"n_tokens is {n_tokens}, expected at least 1")
    context: contextlib.AbstractContextManager[Any]
    if keep is None:
        # On a GPU transformers gives the experts another implementation while it
        # generates, which would unmask a forward in another thread; not this one.
        context = switching(find_experts(model))
    else:
        context = masking(model, keep, downs)
    with evaluating(model), context:
        ids = _generated(model, prompt.ids, n_tokens, progress or _silent)
    n_prompt = prompt.ids.shape[1]
    texts = token_texts(tokenizer, ids)[n_prompt:]
    columns = {"step": range(len(texts)), "token_id": ids[n_prompt:], "token": texts}
    return pd.DataFrame(columns)


def _generated(
    model: Any, ids: torch.Tensor, n_tokens: int, progress: Progress
) -> list[int]:
    """Ids of the prompt and of what follows it."""
    ids = ids.to(model.device)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n_tokens,
        # Whatever else the checkpoint's own settings say of writing well.
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        repetition_penalty=1.0,
        use_cache=True,
        pad_token_id=0,  # never used: there is one text
        stopping_criteria=[_Counter(progress, n_tokens)],
    )
    return [int(token) for token in found[0]]


class _Counter(StoppingCriteria):
    """Stops nothing: tells how many tokens were written."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.done, self.total = progress, 0, total

    def __call__(
        self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any
    ) -> torch.Tensor:
        """No sequence is done."""
        del scores
        self.done += 1
        self.progress(self.done, self.total)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


# --- who serves a token -----------------------------------------------------------


def routing(model: nn.Module, passage: Passage) -> pd.DataFrame:
    """The experts that serve each token of a text, in every layer.

    Args:
        model: the dense model.
        passage: the text, of at least two tokens.

    Returns:
        Columns layer, position, token, expert, p: for each token of each layer the
        routing weights of its experts, largest first.

    Raises:
        SpecError: the text has one token only.
    """
    layers = find_experts(model)
    observers = [_Routes() for _ in layers]
    _observe(model, passage, layers, observers)
    parts = []
    for layer, observer in zip(layers, observers, strict=True):
        part = observer.frame()
        part.insert(0, "layer", layer.layer)
        parts.append(part)
    frame = pd.concat(parts, ignore_index=True)
    texts = [passage.tokens[position] for position in frame["position"]]
    frame.insert(2, "token", texts)
    order = ["layer", "position", "p", "expert"]
    return frame.sort_values(
        order, ascending=[True, True, False, True], ignore_index=True
    )


def atoms_of_token(
    model: nn.Module, passage: Passage, *, layer: int, position: int, n: int = 20
) -> pd.DataFrame:
    """The atoms that add most to a layer's output for one token of a text.

    What atom k adds has the length |p · h_k| · ‖w_down_k‖. Lengths do not add up, for
    vectors may cancel; and where a family normalises the outputs of its experts, it is
    the length before that.

    Args:
        model: the dense model.
        passage: the text, of at least two tokens.
        layer: number of a MoE layer.
        position: of the token, from 0.
        n: atoms to return.

    Returns:
        Columns expert, atom, h, p, w_down_norm, contribution (the length), share (of
        the sum of the lengths of all atoms that serve the token); largest first.

    Raises:
        SpecError: there is no such layer or position, or the text has one token only.
    """
    chosen = _layer_of(model, layer)
    if not 0 <= position < len(passage.tokens):
        raise SpecError(
            f"position is {position}, expected 0 to {len(passage.tokens) - 1}: the "
            f"text has {len(passage.tokens)} tokens"
        )
    observer = _AtToken(position)
    _observe(model, passage, [chosen], [observer])
    frame = pd.concat([_atoms(chosen, *row) for row in observer.rows])
    frame["contribution"] = (frame["p"] * frame["h"]).abs() * frame["w_down_norm"]
    frame["share"] = frame["contribution"] / frame["contribution"].sum()
    order = ["contribution", "expert", "atom"]
    frame = frame.sort_values(order, ascending=[False, True, True], ignore_index=True)
    return frame.head(n)


def _atoms(layer: ExpertsLayer, expert: int, p: float, h: np.ndarray) -> pd.DataFrame:
    """All atoms of an expert that serves a token."""
    W_down = _float64(layer.down[expert])
    return pd.DataFrame(
        {
            "expert": expert,
            "atom": range(layer.d_inter),
            "h": h,
            "p": p,
            "w_down_norm": np.linalg.norm(W_down, axis=0),
        }
    )


class _Routes:
    """Keeps which expert each routed row went to, and its weight."""

    def __init__(self) -> None:
        self.frames: list[pd.DataFrame] = []

    def observe(
        self,
        h: torch.Tensor,
        *,
        p: torch.Tensor,
        rows: torch.Tensor,
        tokens: list[int],
    ) -> None:
        """Keep one call's."""
        del h
        columns = {"position": rows.cpu(), "expert": _experts(tokens), "p": _float64(p)}
        self.frames.append(pd.DataFrame(columns))

    def frame(self) -> pd.DataFrame:
        """Columns position, expert, p."""
        return pd.concat(self.frames)


class _AtToken:
    """Keeps the activations of the experts that serve one token."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.rows: list[tuple[int, float, np.ndarray]] = []
        """Expert, p, and h (I,)."""

    def observe(
        self,
        h: torch.Tensor,
        *,
        p: torch.Tensor,
        rows: torch.Tensor,
        tokens: list[int],
    ) -> None:
        """Keep the token's."""
        experts = _experts(tokens)
        for row in (rows == self.position).nonzero()[:, 0].tolist():
            self.rows.append((int(experts[row]), float(p[row]), _float64(h[row])))


def _observe(
    model: nn.Module,
    passage: Passage,
    layers: list[ExpertsLayer],
    observers: Sequence[Any],
) -> None:
    """Show the observers one forward over the text."""
    _check_length(passage)
    with evaluating(model), observed(layers, observers):
        final_states(model, passage.ids)


# --- what an atom answers to ------------------------------------------------------


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
    """The tokens at which an atom is most active, whatever its sign, in their contexts.

    One forward over `windows`, of which no more than `n` rows are held.

    Args:
        model: the dense model.
        windows: what to look through.
        tokenizer: of the model.
        layer: number of a MoE layer.
        expert: number of an expert of the layer.
        atom: number of an atom of the expert.
        n: tokens to return; fewer are, where fewer are routed to the expert.
        width: tokens of context on either side.
        progress: called after each batch with (windows done, windows in all).

    Returns:
        Columns window, position, h, p, before, token, after; largest |h| first, of
        equal ones the earlier.

    Raises:
        SpecError: there is no such layer, expert or atom, or `n` is not positive.
        CoverageError: the layer did not take part in a forward.
    """
    chosen = _layer_of(model, layer)
    _check_number("expert", expert, chosen.n_experts, layer)
    _check_number("atom", atom, chosen.d_inter, layer)
    if n < 1:
        raise SpecError(f"n is {n}, expected at least 1")
    observer = _MostActive(expert, atom, n)
    report = progress or _silent
    size = max(1, _TOKENS_AT_ONCE // windows.seq_len)
    batches: Any = windows.ids.split(size)
    with evaluating(model), observed([chosen], [observer]):
        for calls, ids in enumerate(batches, start=1):
            observer.first = (calls - 1) * size * windows.seq_len
            final_states(model, ids)
            if observer.calls != calls:
                raise CoverageError(
                    f"layer {layer} took part in {observer.calls} of {calls} forwards, "
                    "expected all"
                )
            report(min(calls * size, windows.n_sequences), windows.n_sequences)
    places = np.divmod(observer.places.numpy(), windows.seq_len)
    rows = [
        (window, position, *_context(tokenizer, windows.ids[window], position, width))
        for window, position in zip(*places, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["window", "position", *_CONTEXT])
    frame.insert(2, "h", _float64(observer.h))
    frame.insert(3, "p", _float64(observer.p))
    return frame


_CONTEXT = ("before", "token", "after")


class _MostActive:
    """Keeps the n rows in which one atom is most active."""

    def __init__(self, expert: int, atom: int, n: int) -> None:
        self.expert, self.atom, self.n = expert, atom, n
        self.calls = 0
        self.first = 0
        """Number of the batch's first token among those of all windows."""
        self.places = torch.zeros(0, dtype=torch.long)
        self.h = torch.zeros(0, dtype=torch.float64)
        self.p = torch.zeros(0, dtype=torch.float64)

    def observe(
        self,
        h: torch.Tensor,
        *,
        p: torch.Tensor,
        rows: torch.Tensor,
        tokens: list[int],
    ) -> None:
        """Merge one batch's."""
        self.calls += 1
        start = sum(tokens[: self.expert])
        own = slice(start, start + tokens[self.expert])
        active = torch.cat([self.h, h[own, self.atom].cpu().double()])
        weights = torch.cat([self.p, p[own].cpu().double()])
        places = torch.cat([self.places, self.first + rows[own].cpu()])
        # Stable, and what was there before stands first: of equal ones the earlier.
        order = active.abs().sort(descending=True, stable=True).indices[: self.n]
        self.h, self.p, self.places = active[order], weights[order], places[order]


def _context(
    tokenizer: Any, ids: torch.Tensor, position: int, width: int
) -> tuple[str, str, str]:
    """The text before a token of a window, of the token, and after it."""
    start = max(0, position - width)
    texts = token_texts(tokenizer, ids[start : position + width + 1].tolist())
    here = position - start
    return "".join(texts[:here]), texts[here], "".join(texts[here + 1 :])


# --- what is asked for ------------------------------------------------------------


def _context_length(model: Any) -> int | None:
    """Tokens that the model can read at once; None where nothing limits them."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def _check_length(passage: Passage) -> None:
    if len(passage.tokens) < 2:
        raise SpecError(
            f"the text {passage.text!r} has 1 token, expected at least 2: write more"
        )


def _layer_of(model: nn.Module, layer: int) -> ExpertsLayer:
    layers = {found.layer: found for found in find_experts(model)}
    if layer not in layers:
        raise SpecError(
            f"layer is {layer}, expected one of the model's MoE layers: "
            f"{', '.join(map(str, layers))}"
        )
    return layers[layer]


def _check_number(name: str, number: int, count: int, layer: int) -> None:
    if not 0 <= number < count:
        raise SpecError(
            f"{name} is {number}, expected 0 to {count - 1} in layer {layer}"
        )


def _silent(_done: int, _total: int) -> None:
    """Tells nobody."""


def _experts(tokens: list[int]) -> np.ndarray:
    """The expert of each routed row, (n,)."""
    return np.repeat(np.arange(len(tokens)), tokens)


def _float64(x: torch.Tensor) -> np.ndarray:
    # Moved first: not every device has float64.
    array: np.ndarray = x.detach().cpu().double().numpy()
    return array
