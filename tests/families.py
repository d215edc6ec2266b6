"""Tiny random models of every MoE family, from its own config class."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import heapr_lab  # noqa: F401 (transformers knows our families after it)

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
COMMON = {
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
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
_GROUPED = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
_LATENT_ATTENTION = LATENT | _GROUPED
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 8,
}
BLOCKS: list[dict[str, Any]] = [
    {"block_type": "moe", "moe_intermediate_size": 8, "num_experts_per_tok": 2},
    {"block_type": "attention"},
    {
        "block_type": "moe",
        "moe_intermediate_size": 12,
        "num_experts_per_tok": 3,
        "n_routed_experts": 6,
    },
]
_INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
_DELTA_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "num_shared_experts": 1,
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
    "qwen3_next": LINEAR_ATTENTION,
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "nemotron_h": {
        "layers_block_type": ["moe", "attention", "moe"],
        "num_hidden_layers": 3,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 8,
    },
    "nemotron_h_puzzle": {
        "block_configs": BLOCKS,
        "moe_intermediate_size": None,
        "num_experts_per_tok": None,
        "num_hidden_layers": None,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 8,
        "moe_latent_size": 12,
    },
    "afmoe": {},
    "cohere2_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe_lite": LATENT,
    "granitemoe_swa": {},
    "granitemoeshared": {},
    "hy_v3": {},
    "hy_v4": LATENT | _INDEXED,
    "jamba": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "minimax": {},
    "minimax_m2": {},
    "qwen3_5_moe_text": LINEAR_ATTENTION,
    "solar_open": _GROUPED,
    "deepseek_v32": _LATENT_ATTENTION | _INDEXED,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {
            "compressed_sparse_attention": 2,
            "heavily_compressed_attention": 4,
        },
        "num_hidden_layers": 3,
        "q_lora_rank": 8,
        "o_groups": 2,
        "o_lora_rank": 4,
        "hc_mult": 2,
        "sliding_window": 4,
        "qk_rope_head_dim": 4,
        **_INDEXED,
    },
    "glm_moe_dsa": _LATENT_ATTENTION | _INDEXED | {"index_topk_pattern": "FSF"},
    "kimi_linear": _LATENT_ATTENTION | _DELTA_ATTENTION,
    "bailing_hybrid": _LATENT_ATTENTION | _DELTA_ATTENTION,
    "mimo_v2_flash": _GROUPED
    | {
        "v_head_dim": 4,
        "num_key_value_heads": 1,  # twice as many in layers with a window
        "sliding_window": 4,
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
        "shared_intermediate_size": 8,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_hidden_layers": 3,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "dense_intermediate_size": 8,
        "shared_intermediate_size": 8,
        "rotary_dim": 4,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "axk1": _LATENT_ATTENTION,
    "axk2": _LATENT_ATTENTION | _INDEXED | {"gated_norm_rank": 4},
    "aria_text": {"moe_num_shared_experts": 1},
    "flint": {
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 8,
        "sliding_window": 4,
    },
    "qwen4_exp_text": LINEAR_ATTENTION
    | {
        "hc_count": 2,
        "hc_lowrank": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,  # as the published one with experts
        "pad_token_id": 0,
    },
    "inkling_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 4,
        "d_rel": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "lara_mini": LINEAR_ATTENTION
    | {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}
    | {"num_hidden_layers": 3, "sliding_window": 4},
    "sarvam_moe": _GROUPED,
    "sarvam_mla": _LATENT_ATTENTION,
    "dots3_note_text": _LATENT_ATTENTION
    | _INDEXED
    | {
        "shared_experts_intermediate_size": 8,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        **{f"swa_{name}": value for name, value in (LATENT | {"head_dim": 8}).items()},
    },
}
REPRESENTATIVES = (
    "qwen2_moe",  # shared experts
    "gpt_oss",  # biases
    "nemotron_h",  # no gate
    "aria_text",  # transposed weights
    "qwen3_next",  # two kinds of attention
    "deepseek_v3",  # latent attention, and a dense layer first
)
"""A family for each trait that code depends on; all are only in the four oracles:
`test_families`, `test_surgery`, `test_checkpoints`, `test_streaming`, and on a GPU."""
HANDING = ("deepseek_v4", "glm_moe_dsa", "hy_v4")
"""Their layers get the ids, or what the layer before attended to, beside states."""


def config_of(model_type: str, **settings: Any) -> Any:
    """A configuration; a test is skipped if the installed transformers has no such."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return AutoConfig.for_model(model_type, **settings)


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> nn.Module:
    """A random model of `family` with every parameter (biases too) away from zero."""
    settings = COMMON | FAMILIES.get(family, {}) | changes
    config = config_of(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomise(model)
    model.set_experts_implementation("eager")  # transformers' default knows no float64
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Give every parameter, and every table of experts, a random value."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter) * 0.3
        parameter.copy_(noise + 1 if "norm" in name or "scale" in name else noise)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token, all of them used
            table.copy_(torch.rand(D_VOCAB, 4).argsort(1)[:, : table.shape[1]])


def tiny_ids(*, n_sequences: int = 3, seq_len: int = 9, seed: int = 1) -> torch.Tensor:
    """Random token ids, LongTensor (n_sequences, seq_len)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(D_VOCAB, (n_sequences, seq_len), generator=generator)
