"""Write a streamed model to files, a part at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from heapr_lab.models.ragged_experts import carry_code
from heapr_lab.models.safetensors_headers import INDEX, SINGLE
from heapr_lab.models.streamed import Stream, stream_of
from heapr_lab.storage import files


def save_streamed(model: Any, folder: Path) -> None:
    """Write what `model.save_pretrained(folder)` writes, holding one part in memory.

    A shard has the tensors of one part, with the names that the family's files have.
    They are in the stream's `stored` type, which is bfloat16 if weights were quantised,
    but for those of another type than the model's.

    Args:
        model: a streamed model.
        folder: an empty folder.
    """
    stream = stream_of(model)
    assert stream is not None
    dtype = model.config.dtype = stream.stored
    if getattr(model.config, "quantization_config", None) is not None:
        carry_code(folder, model.config, type(model).__name__)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    names = list(stream.part_names())
    weight_map: dict[str, str] = {}
    n_bytes = 0
    for number, tensors in enumerate(_parts(model, stream)):
        file = SINGLE.replace(".", f"-{number + 1:05d}-of-{len(names):05d}.", 1)
        stored = revert_weight_conversion(model, tensors)
        whole = {
            # Families keep some in float32, such as a router's corrections.
            name: (own.to(dtype) if own.dtype == stream.dtype else own).contiguous()
            for name, own in stored.items()
        }
        save_file(whole, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(whole, file)
        n_bytes += sum(tensor.nbytes for tensor in whole.values())
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    files.write_json(folder / INDEX, index)


def _parts(model: Any, stream: Stream) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each part, tied ones once; those of no part with the last."""
    tied = set(model.all_tied_weights_keys)
    inside = {name for names in stream.part_names().values() for name in names}
    for number, names in stream.part_names().items():
        stream.fill(number)
        wanted = [name for name in names if name not in tied]
        found = model.state_dict()
        if number == max(stream.part_names()):
            wanted += [name for name in found if name not in inside]
        tensors = {name: found[name] for name in wanted}
        del found
        yield tensors
