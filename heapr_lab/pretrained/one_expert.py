"""A dense Llama as a MoE with one expert a layer, which computes the same.

Mixtral is Llama with routed experts. With one expert the router's softmax is 1 whatever
its weights, which are 0 here, so that the atomic experts are the neurons of the FFN.

Logits are the dense model's to the last bit in float32 on a CPU if the width of the FFN
is a multiple of 32, as it usually is. Otherwise SiLU, which sees the gate's rows apart
here, rounds the last values of each in another way, by 1e-7 of them; and for a single
token some processors add up products in another order.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, MixtralConfig

VERSION = 1
"""Increased whenever the files of a converted model change."""
SHARED = sorted(LlamaConfig.__annotations__.keys() & MixtralConfig.__annotations__)
"""Settings of Llama that Mixtral has too."""
_BLOCK = "block_sparse_moe"
_FFN = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def one_expert_config(config: Any) -> Any:
    """The configuration of the MoE of a Llama with SiLU and without biases."""
    shared: dict[str, Any] = {name: getattr(config, name, None) for name in SHARED}
    return MixtralConfig(
        **shared,
        num_local_experts=1,
        num_experts_per_tok=1,
        dtype=config.dtype,
        architectures=["MixtralForCausalLM"],
    )


def one_expert_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of Llama by their names in Mixtral's files, and the routers.

    The router of a layer, (1, D), comes with its down_proj, (D, I).
    """
    weights = {}
    for name, tensor in tensors.items():
        stem, _, end = name.partition(".mlp.")
        projection, _, kind = end.partition(".")
        if not end:
            weights[name] = tensor
            continue
        weights[f"{stem}.{_BLOCK}.experts.0.{_FFN[projection]}.{kind}"] = tensor
        if projection == "down_proj":
            zeros = torch.zeros(1, len(tensor), dtype=tensor.dtype)
            weights[f"{stem}.{_BLOCK}.gate.weight"] = zeros
    return weights
