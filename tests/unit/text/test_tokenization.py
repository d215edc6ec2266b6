"""A long text tokenised in pieces has the ids it has in one call."""

from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, trainers
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
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


GPT_2 = {"pre_tokenizer": ByteLevel(add_prefix_space=False)}
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
QWEN_3 = {"pre_tokenizer": Sequence([Split(Regex(QWEN), "isolated"), BYTES])}
LLAMA_2 = {"normalizer": Normalizers([Prepend("▁"), Replace(" ", "▁")])}
"""One word from end to end, with a mark before the first."""


def fitted(parts: dict[str, Any]) -> PreTrainedTokenizerFast:
    """A tokenizer of these parts, with 600 merges learned from the text."""
    bpe = Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(bpe, name, part)
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet)
    bpe.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


@pytest.mark.parametrize(
    ("parts", "n_pieces"), [(GPT_2, 50), (QWEN_3, 30), (LLAMA_2, 1)]
)
def test_pieces_have_the_ids_of_the_whole(parts, n_pieces, monkeypatch):
    """The text is cut where that changes nothing, and left whole where it would."""
    tokenizer = fitted(parts)
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
    assert tokenise("", fitted(GPT_2)).shape == (0,)
