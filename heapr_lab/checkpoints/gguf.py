"""Write a checkpoint whose experts all have one width as a GGUF file, for llama.cpp.

For the two families that are tested here against the engine itself; llama.cpp's own
`convert_hf_to_gguf.py` supports others, and reads a `uniform` checkpoint unchanged.

Shapes: E n_experts, D d_model, w the width of all experts.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from heapr_lab.errors import SpecError
from heapr_lab.models.folders import read_config, read_tokenizer
from heapr_lab.models.safetensors_headers import read_source
from heapr_lab.progress import Progress, no_report
from heapr_lab.storage.cache import writing

ELSE = "use llama.cpp's own convert_hf_to_gguf.py"


@dataclass(frozen=True)
class EngineFamily:
    """How llama.cpp runs a family; its assumptions are checked here."""

    architecture: str
    normalises_top_k: bool
    """Whether it divides the weights of the top-k experts by their sum."""


FAMILIES = {
    "qwen2_moe": EngineFamily("qwen2moe", normalises_top_k=False),
    "qwen3_moe": EngineFamily("qwen3moe", normalises_top_k=True),
}
_QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
_EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<index>\d+)\.(?P<rest>.*)")


@dataclass(frozen=True)
class _Piece:
    """A tensor of the GGUF file, and the tensors it is stacked from."""

    name: str
    sources: tuple[tuple[Path, str], ...]
    stored: str
    shape: tuple[int, ...]
    stacked: bool


def write_gguf(
    folder: Path | str, path: Path | str, *, progress: Progress | None = None
) -> Path:
    """Write the model in `folder` to one GGUF file, every tensor in its own dtype.

    Vectors and routers become float32, as llama.cpp requires. Memory holds one
    projection of one layer's experts at a time. `llama-quantize` makes smaller files.

    Args:
        folder: a stock checkpoint (as `save_pruned` writes for a uniform mask) with its
            tokenizer.
        path: the file to write; it is renamed to this when it is complete.
        progress: called with (tensors done, tensors in all).

    Returns:
        `path`.

    Raises:
        SpecError: experts have different widths; llama.cpp would not run the family,
            one of its settings or its tokenizer exactly as transformers does; `path`
            exists or is being written by another process; or the package `gguf` is not
            installed.

    Source: GGUF specification; llama.cpp `src/models/qwen2moe.cpp`, `qwen3moe.cpp`.

    Example:
        >>> write_gguf("pruned", "pruned.gguf")  # doctest: +SKIP
    """
    gguf = _gguf()
    folder, path = Path(folder), Path(path)
    config = read_config(folder)
    family = _family_of(config)
    pieces = list(_pieces(folder, config, family, gguf))
    with writing(path):
        if path.exists():
            raise SpecError(f"{path} exists already: give a new name, or delete it")
        temporary = path.with_name(f".partial-{path.name}")
        writer = gguf.GGUFWriter(temporary, family.architecture)
        try:
            _add_settings(writer, config, gguf)
            _add_tokenizer(writer, folder, config, gguf)
            _write_tensors(writer, pieces, gguf, progress or no_report)
            writer.close()
            temporary.replace(path)
        finally:
            writer.close()
            temporary.unlink(missing_ok=True)
    return path


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


def _family_of(config: Any) -> EngineFamily:
    """The engine's family for `config`.

    Raises:
        SpecError: the engine would compute other logits.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise SpecError(
            "the checkpoint is quantised, or its experts have different widths, which "
            "GGUF does not support: prune with --structure uniform"
        )
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise SpecError(
            f"GGUF export supports {', '.join(FAMILIES)}, found "
            f"{config.model_type}: {ELSE}"
        )
    if bool(config.norm_topk_prob) != family.normalises_top_k:
        raise SpecError(
            f"norm_topk_prob is {config.norm_topk_prob}, but llama.cpp runs every "
            f"{family.architecture} as if it were {family.normalises_top_k}: the file "
            "would give other logits. Use another engine for this model"
        )
    rope = config.rope_parameters or {}
    own_heads = _head_dim(config) * config.num_attention_heads != config.hidden_size
    unusual = {
        "head_dim": own_heads and config.model_type == "qwen2_moe",
        "rope_type": rope.get("rope_type", "default") != "default",
        "use_sliding_window": bool(getattr(config, "use_sliding_window", False)),
        "mlp_only_layers": bool(config.mlp_only_layers),
        "decoder_sparse_step": config.decoder_sparse_step != 1,
        "hidden_act": config.hidden_act != "silu",
    }
    found = [name for name, differs in unusual.items() if differs]
    if found:
        raise SpecError(f"GGUF export does not support this {found[0]}: {ELSE}")
    return family


def _head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


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
        new = names.get_name(whole, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise SpecError(f"{whole} has no name in {family.architecture}: {ELSE}")
        path, name = next(iter(parts.values()))
        shape = stored[path][name].shape
        if stacked := -1 not in parts:
            if sorted(parts) != list(range(config.num_experts)):
                raise SpecError(
                    f"the checkpoint has {whole} for {len(parts)} experts, expected "
                    f"{config.num_experts}: it is incomplete; write it again"
                )
            shape = (len(parts), *shape)
        ordered = tuple(parts[index] for index in sorted(parts))
        # A single row, such as the gate of the shared expert, is a vector in GGUF.
        flat = shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
        yield _Piece(new, ordered, stored[path][name].dtype, flat, stacked)


def _kind(piece: _Piece, gguf: Any) -> Any:
    """The type of a tensor in the file."""
    if len(piece.shape) == 1 or piece.name.endswith("ffn_gate_inp.weight"):
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType[piece.stored]


def _bytes_of(piece: _Piece, kind: Any) -> np.ndarray:
    """The data of a tensor in the file; bfloat16 as 16-bit integers for numpy."""
    found = []
    for path, name in piece.sources:
        with safe_open(path, "pt") as file:
            found.append(file.get_tensor(name))
    tensor = torch.stack(found) if piece.stacked else found[0]
    tensor = tensor.reshape(piece.shape).contiguous()
    if kind.name == "F32":
        tensor = tensor.float()
    plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    array: np.ndarray = plain.numpy()
    return array


def _add_settings(writer: Any, config: Any, gguf: Any) -> None:
    head = _head_dim(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)
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
            f"the tokenizer in {folder} is no byte-level BPE that splits text as GPT-2 "
            f"or Qwen2 does: {ELSE}"
        )
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
    writer.add_add_bos_token(False)
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
    return "qwen2" if pattern.startswith(_QWEN_SPLIT) else None
