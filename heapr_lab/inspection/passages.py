"""A model on one text, token by token: its losses and its continuation.

Everything here runs the dense model, except where a mask is given.

Shapes: L tokens of a text.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import SpecError, whole_number
from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import switching
from heapr_lab.models.likelihood import token_nll
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import Progress, no_report
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import ReplacedDownProj, masking
from heapr_lab.refinement.own_text import Steps
from heapr_lab.text.calibration import tokenise

_UNFINISHED = "\ufffd"
"""What a decoder returns for an incomplete character."""


@dataclass(frozen=True, eq=False)
class Passage:
    """A text as a model reads it."""

    ids: torch.Tensor = field(repr=False)
    """Token ids without special tokens, LongTensor (1, L)."""
    tokens: tuple[str, ...] = field(repr=False)
    """The text of each token, (L,)."""
    n_left_out: int = 0
    """Number of tokens that do not fit the context and are left out."""

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(self.tokens)


def read_passage(
    model: nn.Module,
    tokenizer: Any,
    *,
    text: str,
    room: int = 0,
    most: int | None = None,
) -> Passage:
    """The tokens of `text`, as many as fit the model's context.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        text: the text.
        room: tokens of the context to leave free for a continuation. The end of a text
            that is too long is then kept, otherwise the beginning.
        most: an upper limit to the context length.

    Raises:
        SpecError: the text is empty, or the context is too short for `room`.
    """
    ids = torch.from_numpy(tokenise(text, tokenizer)).long()
    if not len(ids):
        raise SpecError(f"the text {text!r} has no tokens; write at least one word")
    limits = [limit for limit in (_context_length(model), most) if limit is not None]
    context = min(limits, default=room + len(ids))
    if not 0 <= room < context:
        raise SpecError(
            f"{room} tokens are to be left free, but the context has {context} in "
            f"all: ask for at most {context - 1}"
        )
    kept = ids[-(context - room) :] if room else ids[:context]
    texts = token_texts(tokenizer, kept.tolist())
    return Passage(kept[None], tuple(texts), len(ids) - len(kept))


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; joined, they are the text of all tokens.

    A token that ends inside a character has the text ""; the token that completes the
    character has all of it.
    """

    def decode(first: int, last: int) -> str:
        text: str = tokenizer.decode(
            ids[first:last], clean_up_tokenization_spaces=False
        )
        return text

    texts: list[str] = []
    # Some tokenizers drop the space before the first token that they decode, so each
    # token is decoded together with the ones before it that completed a character.
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
    down_projs: ReplacedDownProj | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """The loss of the dense and of the pruned model at each token of a text.

    Units: nats.

    Args:
        model: the dense model.
        passage: the text, of at least two tokens.
        keep: the kept atoms of the pruned model.
        down_projs: replacement for W_down in the pruned model.
        progress: called after each of the two forward passes.

    Returns:
        Columns position, token, dense_nll, pruned_nll, delta_nll (pruned - dense). The
        losses of the first token, which is not predicted, are missing.

    Raises:
        SpecError: the text has only one token, or `keep` is of another model.
    """
    _check_length(passage)
    report = progress or no_report
    with evaluating(model):
        dense = _losses(model, passage)
        report(1, 2)
        with masking(model, keep, down_projs):
            pruned = _losses(model, passage)
        report(2, 2)
    columns = {"dense_nll": dense, "pruned_nll": pruned, "delta_nll": pruned - dense}
    tokens = list(passage.tokens)
    return pd.DataFrame({"position": range(len(tokens)), "token": tokens, **columns})


def _losses(model: nn.Module, passage: Passage) -> np.ndarray:
    """The loss of each token, missing for the first, (L,)."""
    # Moved first: not every device has float64.
    nll = token_nll(model, passage.ids)[0].cpu().double().numpy()
    return np.concatenate([[np.nan], nll])


def continue_text(
    model: nn.Module,
    tokenizer: Any,
    *,
    prompt: Passage,
    n_tokens: int = 40,
    keep: KeepMask | None = None,
    down_projs: ReplacedDownProj | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """The model's greedy continuation of `prompt`.

    Args:
        model: the dense model.
        tokenizer: its tokenizer.
        prompt: a passage that was read with `room` for `n_tokens`.
        n_tokens: tokens to generate; fewer where the model ends its text.
        keep: the kept atoms; all by default.
        down_projs: replacement for W_down, where `keep` is given.
        progress: called after each token.

    Returns:
        Columns step, token_id, token.

    Raises:
        SpecError: `n_tokens` is not positive, or `keep` is of another model.
    """
    whole_number(n_tokens, name="n_tokens")
    context: contextlib.AbstractContextManager[Any]
    if keep is None:
        # On a GPU, transformers switches the implementation of the experts while it
        # generates, which would unmask other threads; this prevents it.
        context = switching(find_experts(model))
    else:
        context = masking(model, keep, down_projs)
    with evaluating(model), context:
        ids = _generated(model, prompt.ids, n_tokens, progress or no_report)
    n_prompt = prompt.ids.shape[1]
    texts = token_texts(tokenizer, ids)[n_prompt:]
    columns = {"step": range(len(texts)), "token_id": ids[n_prompt:], "token": texts}
    return pd.DataFrame(columns)


def _generated(
    model: Any, ids: torch.Tensor, n_tokens: int, progress: Progress
) -> list[int]:
    """Ids of the prompt and of its continuation."""
    ids = ids.to(model.device)
    sequences = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n_tokens,
        # Override the checkpoint's own settings for generation.
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        repetition_penalty=1.0,
        use_cache=True,
        pad_token_id=0,  # never used: there is one text
        stopping_criteria=[Steps(progress, ids.shape[1], n_tokens)],
    )
    return [int(token) for token in sequences[0]]


def _context_length(model: Any) -> int | None:
    """Length of the model's context in tokens; None if unlimited."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


def _check_length(passage: Passage) -> None:
    if len(passage.tokens) < 2:
        raise SpecError(
            f"the text {passage.text!r} has 1 token, expected at least 2: give a "
            "longer text"
        )
