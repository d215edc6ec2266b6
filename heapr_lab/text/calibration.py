"""Windows of token ids for calibration and for testing.

The paper's calibration (appendix): the texts of a corpus are joined by blank lines,
tokenised, and cut into consecutive windows, of which n are drawn without replacement.
Conversations go through the chat template of the tokenizer instead.
With the same seed the draws are nested: the first 8 of 128 windows are the windows of a
set of 8.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from heapr_lab.errors import CorpusError, SpecError, whole_number
from heapr_lab.storage import cache, files
from heapr_lab.storage.hashing import canonical_json
from heapr_lab.text.calibration_spec import check_seed, corpora_of, shares_of, spread
from heapr_lab.text.corpora import Corpus, load_corpus, source_key

_HELD_OUT_EVERY = 4
_FEW, _FEWEST_TO_DECIDE = 10, 8
"""With fewer windows more are held out, or none: a single one has no standard error."""
PIECE_CHARS = 1 << 20
"""Least characters in a piece; a fast tokenizer needs about 100 bytes for each."""
_AT_ONCE = 4
"""Pieces in one call of a fast tokenizer, which processes each in a thread."""
_CONTEXT_CHARS = 256
_N_ATTEMPTS = 64


@dataclass(frozen=True, eq=False, repr=False)
class CalibrationSet:
    """Token windows and their provenance."""

    ids: torch.Tensor
    """Token ids, LongTensor (n_sequences, seq_len)."""
    provenance: dict[str, Any]
    """Corpus, source, split, seed and the like: recorded, never used."""

    def __post_init__(self) -> None:
        """Check the shape.

        Raises:
            SpecError: `ids` is not a LongTensor of at least 1 × 2.
        """
        if self.ids.dtype != torch.long:
            raise SpecError(
                f"ids is a {self.ids.dtype} tensor, expected a LongTensor; "
                "CalibrationSet.from_ids converts other whole numbers"
            )
        token_windows(self.ids)

    @classmethod
    def from_ids(cls, ids: Any) -> "CalibrationSet":
        """A set of given token ids: whole numbers (n_sequences, seq_len).

        Raises:
            SpecError: `ids` has another type or shape.
        """
        return cls(token_windows(ids), {"corpus": "token ids given by the caller"})

    @property
    def n_sequences(self) -> int:
        """Number of windows."""
        return self.ids.shape[0]

    @property
    def seq_len(self) -> int:
        """Tokens in each window."""
        return self.ids.shape[1]

    @property
    def n_predicted(self) -> int:
        """Tokens that have a loss: all but the first of each window."""
        return self.n_sequences * (self.seq_len - 1)

    @property
    def record(self) -> dict[str, Any]:
        """What tables and cards record: the provenance, and the numbers above."""
        sizes = {"n_sequences": self.n_sequences, "seq_len": self.seq_len}
        return self.provenance | sizes

    def joined(self, other: "CalibrationSet") -> "CalibrationSet":
        """These windows, then those of `other`, which must be as long.

        Raises:
            SpecError: they are not.
        """
        if other.seq_len != self.seq_len:
            raise SpecError(
                f"windows of {self.seq_len} and of {other.seq_len} tokens cannot be in "
                "one set: draw them with the same seq_len"
            )
        before = self.provenance.get("joined", [])
        added = other.provenance | {"n_sequences": other.n_sequences}
        return CalibrationSet(
            torch.cat([self.ids, other.ids]),
            {**self.provenance, "joined": [*before, added]},
        )

    def split(self) -> "tuple[CalibrationSet, CalibrationSet]":
        """Three of every four windows to fit to, and the second of every four to judge.

        Raises:
            SpecError: there is only one window.
        """
        if self.n_sequences < 2:
            raise SpecError(
                f"there is {self.n_sequences} window, expected at least 2: one of them "
                "is held out, so give more text"
            )
        held_out = torch.arange(self.n_sequences) % _HELD_OUT_EVERY == 1
        return self._part("fit", ~held_out), self._part("held out", held_out)

    def three_parts(self) -> "tuple[CalibrationSet, CalibrationSet, CalibrationSet]":
        """Three of every four windows to fit to, some to decide on, some to report.

        The second of every four, of every three where there are fewer than 10 windows,
        decide and are reported in turns. Windows that repeat count once, so that what
        is judged on has no part in the fit.

        Raises:
            SpecError: fewer than 8 windows differ, so that one alone would decide.
        """
        _, first = np.unique(self.window_fingerprints(), return_index=True)
        places = torch.from_numpy(np.sort(first))
        if len(places) < _FEWEST_TO_DECIDE:
            raise SpecError(
                f"{len(places)} of {self.n_sequences} windows differ, expected at "
                f"least {_FEWEST_TO_DECIDE}: those that decide are not fitted to"
            )
        every = _HELD_OUT_EVERY - (len(places) < _FEW)
        held_out = torch.arange(len(places)) % every == 1
        judges = places[held_out]
        return (
            self._part("fit", places[~held_out]),
            self._part("deciding", judges[::2]),
            self._part("reported", judges[1::2]),
        )

    def _part(self, name: str, chosen: torch.Tensor) -> "CalibrationSet":
        return CalibrationSet(self.ids[chosen], {**self.provenance, "part": name})

    @property
    def label(self) -> str:
        """Corpora and split, for display."""
        text = f"{self.provenance['corpus']} {self.provenance.get('split', '')}".strip()
        added = self.provenance.get("joined", [])
        return " and ".join([text, *(other["corpus"] for other in added)])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the current ids and their shape."""
        sha = hashlib.sha256(repr(tuple(self.ids.shape)).encode())
        sha.update(self._words().tobytes())
        return sha.hexdigest()

    def window_fingerprints(self) -> list[str]:
        """The first 8 bytes of each window's SHA-256, as hexadecimal digits."""
        hashes = (hashlib.sha256(window.tobytes()) for window in self._words())
        return [sha.hexdigest()[:16] for sha in hashes]

    def _words(self) -> np.ndarray:
        return self.ids.cpu().numpy().astype("<i8")

    def __repr__(self) -> str:
        return (
            f"CalibrationSet({self.label}: {self.n_sequences:,} windows of "
            f"{self.seq_len:,} tokens)"
        )


def token_windows(ids: Any, *, least: int = 2) -> torch.Tensor:
    """Token ids as a LongTensor (n_windows, seq_len).

    Args:
        ids: whole numbers in a tensor, an array or lists.
        least: number of tokens of a window.

    Raises:
        SpecError: they are not whole numbers in at least one window of at least so many
            tokens.
    """
    try:
        tensor = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SpecError(
            f"ids cannot be read as token ids ({error}): expected whole numbers in "
            "windows of one length, (n_windows, seq_len)"
        ) from error
    kind, shape = tensor.dtype, tuple(tensor.shape)
    whole = not (kind == torch.bool or kind.is_floating_point or kind.is_complex)
    if not whole or len(shape) != 2 or shape[0] < 1 or shape[1] < least:
        raise SpecError(
            f"ids are {kind} of shape {shape}, expected whole numbers (n_windows, "
            f"seq_len) in at least one window of at least {least} tokens"
        )
    return tensor.long()


def load_calibration(
    corpus: str,
    tokenizer: Any,
    *,
    n_sequences: int = 128,
    seq_len: int = 2048,
    seed: int = 0,
    split: str = "train",
) -> CalibrationSet:
    """Draw calibration windows as the paper does.

    Args:
        corpus: a corpus name or path (see `heapr_lab.text.corpora`), or a weighted
            mixture such as `"0.7*pydocs + 0.3*ptb"`, which divides `n_sequences`.
        tokenizer: a transformers tokenizer.
        n_sequences: number of windows to draw.
        seq_len: tokens in each window.
        seed: seed of the draw.
        split: `train`, `validation` or `test`.

    Raises:
        SpecError: a number is not positive, the seed is too large, or the mixture
            cannot be parsed.
        CorpusError: a corpus is not available, or has fewer windows than requested; the
            message gives the number available.
    """
    whole_number(n_sequences, name="n_sequences")
    whole_number(seq_len, name="seq_len", least=2)
    check_seed(seed)
    parts, sources = [], []
    for name, count in shares_of(corpus, n_sequences).items():
        text = load_corpus(name, split=split)
        windows = _windows(text, tokenizer, seq_len, least=count)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(windows), generator=generator)[:count]
        parts.append(windows[drawn])
        sources.append(text.provenance | {"n_sequences": count})
    provenance = {"corpus": corpus, "split": split, "seed": seed, "sources": sources}
    return CalibrationSet(torch.cat(parts), provenance)


def load_windows(
    corpus: str,
    tokenizer: Any,
    *,
    seq_len: int = 2048,
    n_sequences: int | None = None,
    split: str = "test",
) -> CalibrationSet:
    """Windows spread evenly over a split, on which perplexity is measured.

    Neighbours are often of one article and lose alike: intervals over the first windows
    are too narrow, those over windows that are spread are not.

    Args:
        corpus: a corpus name or path.
        tokenizer: a transformers tokenizer.
        seq_len: tokens in each window.
        n_sequences: number of windows, the middle ones of as many equal parts of the
            split; by default all of it.
        split: `train`, `validation` or `test`.

    Raises:
        SpecError: a number is not positive.
        CorpusError: the corpus is not available, or has fewer windows than requested.
    """
    whole_number(seq_len, name="seq_len", least=2)
    if n_sequences is not None:
        whole_number(n_sequences, name="n_sequences")
    text = load_corpus(corpus, split=split)
    windows = _windows(text, tokenizer, seq_len, least=n_sequences or 1)
    provenance = {"corpus": corpus, "split": split, "sources": [text.provenance]}
    places = spread(len(windows), n_sequences or len(windows))
    return CalibrationSet(windows[places], provenance)


def windows_key(corpus: str, *, split: str) -> tuple[Hashable, ...]:
    """A key that identifies a corpus or mixture and the current state of its files.

    Raises:
        SpecError: the mixture cannot be parsed.
    """
    return corpus, *(source_key(name, split=split) for name in corpora_of(corpus))


def _windows(
    corpus: Corpus, tokenizer: Any, seq_len: int, *, least: int
) -> torch.Tensor:
    """Consecutive windows (n, seq_len); the last, incomplete one is dropped.

    Raises:
        CorpusError: there are fewer than `least`.
    """
    ids = torch.from_numpy(_token_ids(corpus, tokenizer))
    n_windows = len(ids) // seq_len
    if n_windows < least:
        raise CorpusError(
            f"{corpus.name} ({corpus.split}) has {n_windows} windows of {seq_len} "
            f"tokens, {least} were requested: request fewer, or shorter ones (seq_len)"
        )
    return ids[: n_windows * seq_len].view(n_windows, seq_len).long()


def _token_ids(corpus: Corpus, tokenizer: Any) -> np.ndarray:
    """Ids of the joined corpus without special tokens, int32; cached."""
    key = {"corpus": corpus.fingerprint, "tokenizer": tokenizer_fingerprint(tokenizer)}
    if corpus.chat:
        key["chat_template"] = repr(getattr(tokenizer, "chat_template", None))
    return cached_ids(
        "tokens", key, lambda: tokenise(corpus.joined(tokenizer), tokenizer)
    )


def cached_ids(
    kind: str, key: Mapping[str, Any], compute: Callable[[], np.ndarray]
) -> np.ndarray:
    """The token ids stored for `key`, or `compute()`, stored; as `cache.cached`."""
    return cache.cached(
        kind,
        key,
        compute,
        read=lambda path: files.load_state(path)[0]["ids"],
        write=lambda path, ids: files.save_state(path, {"ids": ids}, {}),
        extension="safetensors",
    )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of everything that determines a tokenizer's ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        plain = json.loads(backend.to_str())
        # These are left over from the last call, and every call sets them again.
        text = canonical_json(plain | {"truncation": None, "padding": None})
    else:  # a slow tokenizer: its class and vocabulary identify it
        text = repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))
    return hashlib.sha256(text.encode()).hexdigest()


# --- long texts in little memory: in pieces, cut between two tokens ---------------


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
