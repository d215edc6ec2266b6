"""Tiny random models of every MoE family, from its own config class."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import heapr_lab  # noqa: F401 (transformers knows deepseek after it)

D_VOCAB = 48
_ROUTED = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 8,
}
_COMMON = {
    "vocab_size": D_VOCAB,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
    "use_cache": False,
    **_ROUTED,
}
_LATENT_ATTENTION = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
_GROUPED = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
_LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 8},
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {},
    "deepseek": {
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "deepseek_v2": _LATENT_ATTENTION | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT_ATTENTION,
    "glm4_moe": _GROUPED,
    "ernie4_5_moe": {"moe_layer_start_index": 0, "moe_num_shared_experts": 1},
    "granitemoe": {},
    "phimoe": {},
    "dots1": _GROUPED,
    "hunyuan_v1_moe": {},
    "qwen3_next": _LINEAR_ATTENTION,
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "nemotron_h": {
        "layers_block_type": ["moe", "attention", "moe"],
        "num_hidden_layers": 3,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 8,
    },
    "afmoe": {},
    "cohere2_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe_lite": {},
    "granitemoe_swa": {},
    "granitemoeshared": {},
    "hy_v3": {},
    "hy_v4": {},
    "jamba": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "minimax": {},
    "minimax_m2": {},
    "qwen3_5_moe_text": {},
    "solar_open": _GROUPED,
}


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> nn.Module:
    """A random model of `family` with every parameter (biases too) away from zero."""
    settings = _COMMON | FAMILIES.get(family, {}) | changes
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.3
            parameter.copy_(noise + 1 if "norm" in name else noise)
    model.set_experts_implementation("eager")  # transformers' default knows no float64
    return model.eval()


def tiny_ids(*, n_sequences: int = 3, seq_len: int = 9, seed: int = 1) -> torch.Tensor:
    """Random token ids, LongTensor (n_sequences, seq_len)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(D_VOCAB, (n_sequences, seq_len), generator=generator)
