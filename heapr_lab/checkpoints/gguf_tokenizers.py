"""The vocabulary of a GGUF file: a byte-level BPE, split as one that llama.cpp knows.

Source: llama.cpp `src/llama-vocab.cpp`, as llama-cpp-python 0.3.36 builds it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from heapr_lab.checkpoints.gguf_families import ELSE
from heapr_lab.errors import SpecError
from heapr_lab.models.folders import read_tokenizer

_QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Ways of splitting for which llama.cpp looks a word up before it merges its bytes."""
_EACH_DIGIT = "each digit"
"""Stands for the part of a tokenizer that does so."""
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a"
    "\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
SPLITS: Mapping[tuple[str, ...], str] = MappingProxyType(
    {
        (_LLAMA3_SPLIT,): "llama-bpe",
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r'[!"#$%&'
            r"'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+",
        ): "deepseek-v3",
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            _EACH_DIGIT,
        ): "deepseek-llm",
    }
)
"""llama.cpp's names of the patterns that split a text, one after the other."""


def add_tokenizer(writer: Any, folder: Path, config: Any, gguf: Any) -> None:
    """Write the vocabulary and merges of the tokenizer in `folder`.

    Raises:
        SpecError: it is no byte-level BPE, or llama.cpp would give other tokens.
    """
    tokenizer = read_tokenizer(folder)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = _pre_tokenizer(backend)
    if backend["model"]["type"] != "BPE" or pre is None:
        raise SpecError(
            f"the tokenizer in {folder} is no byte-level BPE that splits text as "
            f"GPT-2, Qwen2, Llama 3 or DeepSeek does: {ELSE}"
        )
    _check_words(tokenizer.backend_tokenizer.model, backend, pre)
    _check_digits(backend, pre)
    tokens = [f"[PAD{index}]" for index in range(config.vocab_size)]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, index in backend["model"]["vocab"].items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for added in backend["added_tokens"]:
        special = gguf.TokenType.CONTROL if added["special"] else None
        tokens[added["id"]] = added["content"]
        types[added["id"]] = special or gguf.TokenType.USER_DEFINED
    merges = backend["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    first = tokenizer("a")["input_ids"][0]
    writer.add_add_bos_token(first == tokenizer.bos_token_id)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(backend: dict[str, Any]) -> str | None:
    """llama.cpp's name of the splitting of text before the merges; None if unknown."""
    found = backend.get("pre_tokenizer") or {}
    parts = found.get("pretokenizers", [found])
    last = parts[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if len(parts) == 1 and last.get("use_regex", True):
        return "gpt-2"
    splits = tuple(map(_split, parts[:-1]))
    if len(splits) == 1 and splits[0].startswith(_QWEN_SPLIT):
        return "qwen2"
    return SPLITS.get(splits)


def _split(part: dict[str, Any]) -> str:
    """The pattern of a part of a tokenizer that splits text; empty for other parts."""
    if part.get("type") == "Digits" and part.get("individual_digits"):
        return _EACH_DIGIT
    if part.get("behavior") != "Isolated" or part.get("invert"):
        return ""
    pattern = str(part.get("pattern", {}).get("Regex", ""))
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


def _check_digits(backend: dict[str, Any], pre: str) -> None:
    """Check that digits, which llama.cpp does not separate, are never merged.

    Raises:
        SpecError: the vocabulary has a token of several digits.
    """
    if pre != "deepseek-llm":
        return
    words = set(backend["model"]["vocab"])
    words -= {added["content"] for added in backend["added_tokens"]}
    several = next((word for word in words if len(word) > 1 and word.isnumeric()), None)
    if several is not None:
        raise SpecError(
            f"the token {several!r} has several digits, which this tokenizer never "
            f"gives and llama.cpp would: {ELSE}"
        )


def _check_words(model: Any, backend: dict[str, Any], pre: str) -> None:
    """Check that looking words up first, or not, gives the same tokens.

    Raises:
        SpecError: the tokenizer does the one, the engine the other, and some token is
            not what its bytes merge to.
    """
    words_first = bool(model.ignore_merges)
    if words_first == (pre in _WHOLE_WORDS_FIRST):
        return
    words = set(backend["model"]["vocab"])
    words -= {added["content"] for added in backend["added_tokens"]}
    model.ignore_merges = False
    other = next((word for word in words if len(model.tokenize(word)) != 1), None)
    model.ignore_merges = words_first
    if other is not None:
        raise SpecError(
            f"the token {other!r} is not what its bytes merge to, so that llama.cpp "
            f"would give other tokens than this tokenizer: {ELSE}"
        )
