"""Tokenise long texts in little memory: in pieces, cut where the tokenizer cuts too."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

PIECE_CHARS = 1 << 20
"""Characters of a piece, at least; a fast tokenizer needs some 100 bytes for each."""
_AT_ONCE = 4
"""Pieces that a fast tokenizer is given together: it does each in a thread."""
_CONTEXT_CHARS = 256
_N_ATTEMPTS = 64


def tokenise(text: str, tokenizer: Any) -> np.ndarray:
    """Ids of `text` without special tokens, (n,) int32, as if tokenised in one call.

    Most tokenizers never join two words across a blank line, so that pieces cut there
    give the ids of the whole. Each cut is tried on the text around it first; where
    cutting changes the ids (a tokenizer that marks the beginning of its input, say)
    the text stays in one piece and needs the memory that it needs.
    """
    pieces = _pieces(text, tokenizer)
    parts = []
    while some := list(itertools.islice(pieces, _AT_ONCE)):
        encoded = tokenizer(some, add_special_tokens=False, verbose=False)
        parts += [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _ids(text: str, tokenizer: Any) -> np.ndarray:
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)
    return np.asarray(encoded["input_ids"], dtype=np.int32)


def _pieces(text: str, tokenizer: Any) -> Iterator[str]:
    start = 0
    while (cut := _next_cut(text, start + PIECE_CHARS, tokenizer)) is not None:
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _next_cut(text: str, position: int, tokenizer: Any) -> int | None:
    """The first blank line from `position` on before which the text may be cut."""
    for _ in range(_N_ATTEMPTS):
        cut = text.find("\n\n", position)
        if cut < 0:
            return None
        if _cuts_at(text, cut, tokenizer):
            return cut
        position = cut + 1
    return None


def _cuts_at(text: str, cut: int, tokenizer: Any) -> bool:
    left = text[max(0, cut - _CONTEXT_CHARS) : cut]
    right = text[cut : cut + _CONTEXT_CHARS]
    apart = [_ids(left, tokenizer), _ids(right, tokenizer)]
    return np.array_equal(np.concatenate(apart), _ids(left + right, tokenizer))
