"""A long text tokenised in pieces has the ids it has in one call."""

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from heapr_lab.text import calibration
from heapr_lab.text.calibration import tokenise

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The splits of Qwen and Llama 3: punctuation keeps the line ends that follow it."""

PARAGRAPHS = [
    "An expert is split into atoms.",
    "Each one has a row of W_up and W_gate, and a column of W_down",
    "  Some begin with blanks and end with them, too:  ",
    "1234567 numbers, 89",
    "\nor with a line end\n",
    "words without any full stop",
] * 40
TEXT = "\n\n".join(PARAGRAPHS)


def byte_level() -> Tokenizer:
    """A tokenizer like that of GPT-2."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


def qwen_like() -> Tokenizer:
    """A tokenizer like that of Qwen 3."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def llama_2_like() -> Tokenizer:
    """One word from end to end, with a mark before the first."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return bpe


def fitted(make: Callable[[], Tokenizer]) -> PreTrainedTokenizerFast:
    """A tokenizer with 600 merges learned from the text."""
    bpe = make()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


@pytest.mark.parametrize(
    ("make", "n_pieces"), [(byte_level, 50), (qwen_like, 30), (llama_2_like, 1)]
)
def test_pieces_have_the_ids_of_the_whole(make, n_pieces, monkeypatch):
    """The text is cut where that changes nothing, and left whole where it would."""
    tokenizer = fitted(make)
    expected = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(calibration, "PIECE_CHARS", 100)
    pieces = list(calibration._pieces(TEXT, tokenizer))
    assert "".join(pieces) == TEXT
    assert (len(pieces) == 1) if n_pieces == 1 else (len(pieces) >= n_pieces)
    ids = tokenise(TEXT, tokenizer)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


def test_an_empty_text_has_no_tokens():
    """Nothing in, nothing out."""
    assert tokenise("", fitted(byte_level)).shape == (0,)
