"""Tokenise long texts in little memory: in pieces, cut between two tokens."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

PIECE_CHARS = 1 << 20
"""Least characters in a piece; a fast tokenizer needs about 100 bytes for each."""
_AT_ONCE = 4
"""Pieces in one call of a fast tokenizer, which processes each in a thread."""
_CONTEXT_CHARS = 256
_N_ATTEMPTS = 64


def tokenise(text: str, tokenizer: Any) -> np.ndarray:
    """Ids of `text` without special tokens, (n,) int32, as if tokenised in one call.

    Most tokenizers never join two words across a blank line, so that pieces cut there
    give the same ids as the whole text. Each cut is first tried on the text around it.
    If cutting changes the ids (as with a tokenizer that marks the beginning of its
    input), the text is not cut, and needs more memory.
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
    """The first blank line at or after `position` where the text can be cut."""
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
