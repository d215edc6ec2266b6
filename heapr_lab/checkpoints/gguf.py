"""Write a checkpoint as a GGUF file, for llama.cpp: one width of experts in each layer.

For the families of `gguf_families`, which are tested here against the engine itself;
llama.cpp's own `convert_hf_to_gguf.py` supports others, and reads a `uniform`
checkpoint unchanged.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from heapr_lab.checkpoints.gguf_families import (
    ELSE,
    Change,
    EngineFamily,
    family_of,
    layer_widths,
)
from heapr_lab.checkpoints.gguf_tokenizers import add_tokenizer
from heapr_lab.errors import SpecError
from heapr_lab.models.folders import read_config
from heapr_lab.models.safetensors_headers import read_source
from heapr_lab.progress import Progress, no_report
from heapr_lab.storage.cache import writing

_EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<index>\d+)\.(?P<rest>.*)")
_LAYER = re.compile(r"\w+\.layers\.(?P<index>\d+)\.")
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
            add_tokenizer(writer, folder, config, gguf)
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
    """The package that writes the format.

    Raises:
        SpecError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise SpecError(
            "the package gguf is not installed: pip install gguf"
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
    n_experts = getattr(config, family.n_experts)
    for whole, parts in sorted(_stacks(stored).items()):
        if _is_beyond(whole, config.num_hidden_layers):
            continue
        path, name = next(iter(parts.values()))
        shape = stored[path][name].shape
        if stacked := -1 not in parts:
            if sorted(parts) != list(range(n_experts)):
                raise SpecError(
                    f"the checkpoint has {whole} for {len(parts)} experts, expected "
                    f"{n_experts}: it is incomplete; write it again"
                )
            shape = (len(parts), *shape)
        ordered = tuple(parts[index] for index in sorted(parts))
        for known, made in _written(whole, family):
            new = names.get_name(known, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise SpecError(f"{whole} has no name in {family.architecture}: {ELSE}")
            change = _with(config, made)
            after = tuple(change(torch.empty(shape, device="meta")).shape)
            # A single row, such as the gate of the shared expert, is a vector in GGUF.
            flat = after[1:] if len(after) == 2 and after[0] == 1 else after
            yield _Piece(new, ordered, stored[path][name].dtype, flat, stacked, change)


def _stacks(
    stored: Mapping[Path, Mapping[str, Any]],
) -> dict[str, dict[int, tuple[Path, str]]]:
    """Where each expert's part of a tensor is, by its name without their index.

    What is not of experts has the index -1.
    """
    found: dict[str, dict[int, tuple[Path, str]]] = {}
    for path, tensors in stored.items():
        for name in tensors:
            match = _EXPERT.fullmatch(name)
            whole = f"{match['stack']}.{match['rest']}" if match else name
            found.setdefault(whole, {})[int(match["index"]) if match else -1] = (
                path,
                name,
            )
    return found


def _is_beyond(name: str, n_layers: int) -> bool:
    """Whether a tensor is of a layer that predicts further tokens (not loaded here)."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer["index"]) >= n_layers


def _written(name: str, family: EngineFamily) -> Iterator[tuple[str, Change]]:
    """What is written of the tensor `name`: names that gguf knows, and the changes."""
    for end, parts in family.splits.items():
        if name.endswith(end):
            stem = name.removesuffix(end)
            yield from ((f"{stem}{part}", change) for part, change in parts.items())
            return
    changes = (made for end, made in family.changes.items() if name.endswith(end))
    for pattern, replacement in family.names.items():
        name = re.sub(pattern, replacement, name)
    yield name, next(changes, lambda tensor, _: tensor)


def _with(config: Any, change: Change) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: change(tensor, config)


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
    writer.add_layer_norm_rms_eps(getattr(config, family.norm_eps))
    writer.add_expert_count(getattr(config, family.n_experts))
    writer.add_expert_used_count(config.num_experts_per_tok)
    kinds = {
        torch.float32: gguf.LlamaFileType.ALL_F32,
        torch.float16: gguf.LlamaFileType.MOSTLY_F16,
        torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
    }
    writer.add_file_type(kinds[config.dtype or torch.float32])
