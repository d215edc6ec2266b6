"""Write a streamed model to files, a part at a time."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from heapr_lab.models.ragged_experts import carry_code
from heapr_lab.models.safetensors_headers import INDEX, SINGLE, Stored, read_header
from heapr_lab.progress import Progress, no_report
from heapr_lab.storage import files
from heapr_lab.streaming.stream import Stream, stream_of

_WRITTEN = ".partial-written.json"
"""In an unfinished folder: the SHA-256 of each finished shard."""


def save_streamed(
    model: Any, folder: Path, *, progress: Progress | None = None
) -> dict[str, str]:
    """Write what `model.save_pretrained(folder)` writes, holding one part in memory.

    A shard has the tensors of one part, with the names that the family's files have.
    They are in the stream's `stored` type, which is bfloat16 if weights were quantised,
    but for those of another type than the model's. Shards that an interrupted call of
    the same model finished are kept.

    Args:
        model: a streamed model.
        folder: an empty folder, or that of the interrupted call.
        progress: called with (parts written, parts in all).

    Returns:
        The SHA-256 of each shard.
    """
    stream = stream_of(model)
    assert stream is not None
    model.config.dtype = stream.stored
    if getattr(model.config, "quantization_config", None) is not None:
        carry_code(folder, model.config, type(model).__name__)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    written = _finished(folder)
    n_parts = len(stream.parts)
    for done, number in enumerate(stream.parts, 1):
        path = folder / SINGLE.replace(".", f"-{done:05d}-of-{n_parts:05d}.", 1)
        if path.name not in written:
            tensors = _stored(model, stream, number)
            with files.replacing(path) as temporary:
                save_file(tensors, temporary, metadata={"format": "pt"})
            del tensors
            written[path.name] = files.checksum(path)
            files.write_json(folder / _WRITTEN, written)
        (progress or no_report)(done, n_parts)
    write_index(folder)
    return written


def _finished(folder: Path) -> dict[str, str]:
    """The SHA-256 of each shard that is there and whole; others are removed."""
    noted = folder / _WRITTEN
    written = files.read_object(noted) if noted.exists() else {}
    for path in folder.glob("*.safetensors"):
        if written.get(path.name) != files.checksum(path):
            path.unlink()
    return {name: sha for name, sha in written.items() if (folder / name).exists()}


def write_index(folder: Path) -> None:
    """Write the index of the shards in a folder, whose headers are read."""
    stored: Stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= read_header(path)
    n_bytes = sum(tensor.n_bytes for tensor in stored.values())
    weight_map = {name: tensor.file.name for name, tensor in stored.items()}
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    files.write_json(folder / INDEX, index)


def _stored(model: Any, stream: Stream, number: int) -> dict[str, torch.Tensor]:
    """The tensors of a part as they are written; those of no part with the last."""
    tied = model.all_tied_weights_keys
    with stream.holding(number):
        state = model.state_dict()
    wanted = [name for name in stream.parts[number].names if name not in tied]
    if number == max(stream.parts):
        wanted += stream.outside
    cast = {name: _in_stored_type(stream, name, state[name]) for name in wanted}
    tensors = revert_weight_conversion(model, cast)
    if stream.packing is not None:
        tensors = stream.packing.written(tensors)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _in_stored_type(stream: Stream, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is written: most are in the stream's `stored` type."""
    stays = tensor.dtype != stream.dtype or stream.stays(name)
    return tensor if stays else tensor.to(stream.stored)
