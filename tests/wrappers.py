"""Tiny random multimodal wrappers around MoE text models, from their own configs."""

from typing import Any

import torch
from families import COMMON, FAMILIES, LATENT, LINEAR_ATTENTION, config_of, randomise
from torch import nn
from transformers import AutoModelForMultimodalLM

_VISION = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "patch_size": 2,
    "image_size": 8,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": [0],
}
_MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
_LINEAR = LINEAR_ATTENTION | {
    "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}
}
_AUDIO = {
    "d_model": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "output_dim": 16,
    "downsample_hidden_size": 4,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "n_mel_bins": 4,
    "mel_vocab_size": 4,
    "text_hidden_size": 16,
}
_OCR = {
    "sam_config": {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "mlp_dim": 8,
        "output_channels": 4,
        "downsample_channels": [4, 8],
        "global_attn_indexes": [0],
        "window_size": 2,
    },
    "encoder_config": {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": {"text_config": _LINEAR},
    "qwen3_vl_moe": {"text_config": {"rope_parameters": _MROPE}},
    "gemma4": {"text_config": FAMILIES["gemma4_text"]},
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0},
            "num_hidden_layers": 3,
        }
    },
    "qwen3_omni_moe_thinker": {
        "text_config": {"rope_parameters": _MROPE},
        "audio_config": _AUDIO,
    },
    "mistral3": {
        "text_config": LATENT | {"model_type": "mistral4"},
        "vision_config": {"model_type": "pixtral"},
    },
    "mistral_large4": {
        "text_config": LATENT
        | {"index_n_heads": 2, "index_head_dim": 8, "num_hidden_layers": 3}
    },
    "minimax_m3_vl": {
        "text_config": {
            "dense_intermediate_size": 8,
            "shared_intermediate_size": 8,
            "rotary_dim": 4,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 2,
            "num_hidden_layers": 4,
        },
        "projector_hidden_size": 8,
    },
    "kimi_k25": {
        "text_config": FAMILIES["deepseek_v3"]
        | {"model_type": "deepseek_v3", "num_hidden_layers": 2}
    },
    "internvl": {"text_config": {"model_type": "qwen3_moe"}},
    "aria": {},
    "glm5_next": {
        "text_config": LATENT
        | {
            "mlp_layer_types": ["dense", "sparse"],
            "head_dim": 0,
            "qk_rope_head_dim": 0,
            "linear_head_dim": 8,
            "linear_num_heads": 2,
            "index_n_heads": 2,
            "index_head_dim": 8,
        },
        "vision_config": {"projection_intermediate_size": 8},
    },
    "hy_v4_vl": {
        "text_config": FAMILIES["hy_v4"]
        | {"rope_parameters": _MROPE | {"mrope_section": [1, 1, 0]}},
        "vision_config": {"max_image_size": 8},
    },
    "inkling_mm_model": {
        "text_config": FAMILIES["inkling_text"],
        "audio_config": _AUDIO,
        "vision_config": {"text_hidden_size": 16},
    },
    "muse_spark": {
        "text_config": {"moe_hidden_size": 8},
        "audio_config": {
            "hidden_sizes": [4, 4],
            "depths": [1, 1],
            "patch_sizes": [4, 2],
            "num_hidden_layers": 2,
            "out_hidden_size": 16,
            "conv_kernel_size": 3,
        },
        "out_hidden_size": 16,
        "projector_hidden_size": 8,
        "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4},
    },
    "qwen4_exp": {
        "text_config": FAMILIES["qwen4_exp_text"]
        | _LINEAR
        | {
            "ngram_vocab_size_base": 50,
            "make_ngram_vocab_size_divisible_by": 2,
            "split_ngram_parts": 2,
        }
    },
    "deepseek_ocr2": {
        "vision_config": _OCR,
        "text_config": {"mlp_layer_types": ["dense", "sparse"]},
    },
    "unlimited_ocr": {"vision_config": _OCR},
    "dots3_note": {
        "text_config": LATENT
        | {
            "shared_experts_intermediate_size": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
        },
        "vision_config": {
            "adapter_in_dim": 8,
            "adapter_out_dim": 16,
            "mlp_layer_types": ["dense"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        "audio_config": _AUDIO
        | {
            "adapter_out_dim": 16,
            "adapter_input_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    },
}
NO_STOCK = ("inkling_mm_model",)
"""Wrappers whose shared experts have the width of the routed ones."""


def tiny_wrapper(
    model_type: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **text: Any
) -> nn.Module:
    """A random wrapper with every parameter away from zero; `text` are settings."""
    settings = WRAPPERS[model_type]
    config = config_of(
        model_type,
        **settings
        | {
            "text_config": COMMON | settings.get("text_config", {}) | text,
            "vision_config": _VISION | settings.get("vision_config", {}),
        },
    )
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(config, dtype=dtype)
    randomise(model)
    model.set_experts_implementation("eager")
    return model.eval()
