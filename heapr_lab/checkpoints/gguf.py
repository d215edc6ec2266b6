"""Write a checkpoint as a GGUF file, for llama.cpp: one width of experts in each layer.

For the families of `gguf_families`, which are tested here against the engine itself;
llama.cpp's own `convert_hf_to_gguf.py` supports others, and reads a `uniform`
checkpoint unchanged.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from heapr_lab.checkpoints.gguf_families import (
    ELSE,
    EngineFamily,
    family_of,
    head_dim,
    layer_widths,
)
from heapr_lab.errors import SpecError
from heapr_lab.models.folders import read_config, read_tokenizer
from heapr_lab.models.safetensors_headers import read_source
from heapr_lab.progress import Progress, no_report
from heapr_lab.storage.cache import writing

_QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Ways of splitting for which llama.cpp looks a word up before it merges its bytes."""
_EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<index>\d+)\.(?P<rest>.*)")
_SINGLE = re.compile(r".*\.(ffn_gate_inp|ssm_conv1d|ssm_norm)\.weight|.*\.ssm_[ad]")
"""Matrices that llama.cpp needs in float32."""


@dataclass(frozen=True)
class _Piece:
    """A tensor of the GGUF file, and the tensors it is stacked from."""

    name: str
    sources: tuple[tuple[Path, str], ...]
    stored: str
    shape: tuple[int, ...]
    stacked: bool
    change: Callable[[torch.Tensor], torch.Tensor]


def write_gguf(
    folder: Path | str, path: Path | str, *, progress: Progress | None = None
) -> Path:
    """Write the model in `folder` to one GGUF file, every tensor in its own dtype.

    Vectors and routers become float32, as llama.cpp requires. Memory holds one
    projection of one layer's experts at a time. `quantise_gguf` makes smaller files.

    Args:
        folder: a checkpoint with its tokenizer, as `save_pruned` writes for a uniform
            mask and, for Nemotron-H, for one with a width in each layer.
        path: the file to write; it is renamed to this when it is complete.
        progress: called with (tensors done, tensors in all).

    Returns:
        `path`.

    Raises:
        SpecError: experts have widths that llama.cpp does not load; it would not run
            the family, one of its settings or its tokenizer exactly as transformers
            does; `path` exists or is being written by another process; or the package
            `gguf` is not installed.

    Source: GGUF specification; the files of llama.cpp in `gguf_families`.

    Example:
        >>> write_gguf("pruned", "pruned.gguf")  # doctest: +SKIP
    """
    gguf = _gguf()
    folder, path = Path(folder), Path(path)
    config = read_config(folder)
    family = family_of(config)
    widths = layer_widths(config, family)
    pieces = list(_pieces(folder, config, family, gguf))
    with writing(path):
        if path.exists():
            raise SpecError(f"{path} exists already: give a new name, or delete it")
        temporary = path.with_name(f".partial-{path.name}")
        writer = gguf.GGUFWriter(temporary, family.architecture)
        try:
            _add_settings(writer, config, family, gguf)
            family.add_settings(writer, config, widths)
            _add_tokenizer(writer, folder, config, gguf)
            _write_tensors(writer, pieces, gguf, progress or no_report)
            writer.close()
            temporary.replace(path)
        finally:
            writer.close()
            temporary.unlink(missing_ok=True)
    return path


def read_gguf(path: Path) -> Any:
    """A reader of the GGUF file `path`: settings and tensors.

    Raises:
        SpecError: there is none, or it is damaged; or the package is not installed.
    """
    try:
        return _gguf().GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise SpecError(
            f"{path} is no GGUF file ({error}): expected one that write_gguf wrote"
        ) from error


def _write_tensors(
    writer: Any, pieces: list[_Piece], gguf: Any, progress: Progress
) -> None:
    for piece in pieces:
        kind = _kind(piece, gguf)
        size = int(np.prod(piece.shape)) * (4 if kind.name == "F32" else 2)
        writer.add_tensor_info(
            piece.name, piece.shape, np.dtype(np.float32), size, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, piece in enumerate(pieces, start=1):
        writer.write_tensor_data(_bytes_of(piece, _kind(piece, gguf)))
        progress(number, len(pieces))


def _gguf() -> Any:
    """The package that writes the format, an optional extra.

    Raises:
        SpecError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise SpecError(
            "the package gguf is not installed: pip install 'heapr-lab[gguf]'"
        ) from error
    return gguf


def _pieces(
    folder: Path, config: Any, family: EngineFamily, gguf: Any
) -> Iterator[_Piece]:
    """The tensors to write, with experts stacked, in the order of their names.

    Raises:
        SpecError: an expert is missing, or a tensor has no name in the engine.
    """
    stored, _ = read_source(folder)
    keys = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = keys[family.architecture]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stacks: dict[str, dict[int, tuple[Path, str]]] = {}
    for path, tensors in stored.items():
        for name in tensors:
            match = _EXPERT.fullmatch(name)
            whole = f"{match['stack']}.{match['rest']}" if match else name
            index = int(match["index"]) if match else -1
            stacks.setdefault(whole, {})[index] = (path, name)
    for whole, parts in sorted(stacks.items()):
        known = _known(whole, family)
        new = names.get_name(known, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise SpecError(f"{whole} has no name in {family.architecture}: {ELSE}")
        path, name = next(iter(parts.values()))
        shape = stored[path][name].shape
        if stacked := -1 not in parts:
            n_experts = getattr(config, family.n_experts)
            if sorted(parts) != list(range(n_experts)):
                raise SpecError(
                    f"the checkpoint has {whole} for {len(parts)} experts, expected "
                    f"{n_experts}: it is incomplete; write it again"
                )
            shape = (len(parts), *shape)
        ordered = tuple(parts[index] for index in sorted(parts))
        change = _change_of(whole, config, family)
        shape = tuple(change(torch.empty(shape, device="meta")).shape)
        # A single row, such as the gate of the shared expert, is a vector in GGUF.
        flat = shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
        yield _Piece(new, ordered, stored[path][name].dtype, flat, stacked, change)


def _known(name: str, family: EngineFamily) -> str:
    """The name of a tensor as the package gguf knows it."""
    for pattern, replacement in family.names.items():
        name = re.sub(pattern, replacement, name)
    return name


def _change_of(
    name: str, config: Any, family: EngineFamily
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes of the tensor `name` the one that is stored in the file."""
    for end, change in family.changes.items():
        if name.endswith(end):
            return lambda tensor: change(tensor, config)
    return lambda tensor: tensor


def _kind(piece: _Piece, gguf: Any) -> Any:
    """The type of a tensor in the file."""
    if len(piece.shape) == 1 or _SINGLE.fullmatch(piece.name):
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType[piece.stored]


def _bytes_of(piece: _Piece, kind: Any) -> np.ndarray:
    """The data of a tensor in the file; bfloat16 as 16-bit integers for numpy."""
    found = []
    for path, name in piece.sources:
        with safe_open(path, "pt") as file:
            found.append(file.get_tensor(name))
    tensor = torch.stack(found) if piece.stacked else found[0]
    tensor = piece.change(tensor).reshape(piece.shape).contiguous()
    if kind.name == "F32":
        tensor = tensor.float()
    plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    array: np.ndarray = plain.numpy()
    return array


def _add_settings(writer: Any, config: Any, family: EngineFamily, gguf: Any) -> None:
    """What every family has."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(getattr(config, family.norm_eps))
    writer.add_expert_count(getattr(config, family.n_experts))
    writer.add_expert_used_count(config.num_experts_per_tok)
    kinds = {
        torch.float32: gguf.LlamaFileType.ALL_F32,
        torch.float16: gguf.LlamaFileType.MOSTLY_F16,
        torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
    }
    writer.add_file_type(kinds[config.dtype or torch.float32])


def _add_tokenizer(writer: Any, folder: Path, config: Any, gguf: Any) -> None:
    """Vocabulary and merges of a byte-level BPE.

    Raises:
        SpecError: the tokenizer is of another kind.
    """
    tokenizer = read_tokenizer(folder)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = _pre_tokenizer(backend)
    if backend["model"]["type"] != "BPE" or pre is None:
        raise SpecError(
            f"the tokenizer in {folder} is no byte-level BPE that splits text as "
            f"GPT-2, Qwen2 or Llama 3 does: {ELSE}"
        )
    _check_words(tokenizer.backend_tokenizer.model, backend, pre)
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
    pattern = parts[0].get("pattern", {}).get("Regex", "") if len(parts) == 2 else ""
    if pattern == _LLAMA3_SPLIT:
        return "llama-bpe"
    return "qwen2" if pattern.startswith(_QWEN_SPLIT) else None


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
