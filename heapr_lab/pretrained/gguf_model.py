"""A dense Llama in a GGUF file, as a folder of a MoE with one expert a layer."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from heapr_lab.models.folders import read_gguf
from heapr_lab.models.safetensors_headers import SINGLE
from heapr_lab.pretrained.one_expert import one_expert_config, one_expert_tensors


def write_gguf_as_moe(path: Path, folder: Path) -> Any:
    """Write the MoE of the model in a GGUF file, in float32, to an empty folder.

    Float32 has the dequantised values exactly, as a scale of 16 bits times a small
    integer may have more digits than bfloat16. The result is the tokenizer, which is
    not written yet.

    Raises:
        SpecError: the file is damaged, holds another kind of model, or the package gguf
            is not installed.
        LayoutError: the model is of a form that Mixtral does not have.
    """
    model, tokenizer = read_gguf(path)
    config = one_expert_config(_dequantised(model.config))
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    dense = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    tensors = one_expert_tensors(dense)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer


def _dequantised(config: Any) -> Any:
    """The configuration of the weights as they were read.

    GGUF stores ε in float32; its shortest decimal is the one that was meant, and is the
    same number in the float32 that norms are computed in.
    """
    plain = copy.deepcopy(config)
    del plain.quantization_config
    plain.dtype = torch.float32
    plain.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
    return plain
