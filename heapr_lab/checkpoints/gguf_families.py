"""The families that are written as GGUF files, and what llama.cpp assumes of each.

Source: llama.cpp `src/models/qwen2moe.cpp`, `qwen3moe.cpp`, `olmoe.cpp`,
`nemotron-h.cpp`, `deepseek.cpp` and `deepseek2.cpp`, as llama-cpp-python 0.3.36 builds
them.

Shapes: L layers of the decoder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from heapr_lab.errors import SpecError
from heapr_lab.models.folders import quantisation
from heapr_lab.models.ragged_experts import METHOD
from heapr_lab.models.widths import Widths, widths_by_layer

ELSE = "use llama.cpp's own convert_hf_to_gguf.py"

Change = Callable[[Tensor, Any], Tensor]
"""A tensor as it is stored in the file: (tensor, configuration)."""


@dataclass(frozen=True)
class EngineFamily:
    """How llama.cpp runs a family; its assumptions are checked here."""

    architecture: str
    unusual: Callable[[Any], dict[str, bool]]
    """Settings, by name, and whether the engine would not compute with them."""
    add_settings: Callable[[Any, Any, list[int]], None]
    """Writes what only this family has: (writer, configuration, widths (L,))."""
    normalises_top_k: bool | None = None
    """Whether it divides the weights of the top-k experts by their sum; None if the
    file says so."""
    width: str = "moe_intermediate_size"
    """The setting with the width of the experts."""
    n_experts: str = "num_experts"
    norm_eps: str = "rms_norm_eps"
    per_layer: bool = False
    """Whether the loader reads a width for every layer."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Other names of tensors for the package gguf: pattern and replacement."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """How a tensor is stored otherwise, by the end of its name."""
    splits: Mapping[str, Mapping[str, Change]] = field(default_factory=dict)
    """What is stored in the place of a tensor, by the ends of both names."""


def family_of(config: Any) -> EngineFamily:
    """The engine's family for `config`.

    Raises:
        SpecError: the engine would compute other logits.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise SpecError(
            f"GGUF export supports {', '.join(FAMILIES)}, found "
            f"{config.model_type}: {ELSE}"
        )
    known = family.normalises_top_k
    if known is not None and bool(config.norm_topk_prob) != known:
        raise SpecError(
            f"norm_topk_prob is {config.norm_topk_prob}, but llama.cpp runs every "
            f"{family.architecture} as if it were {known}: the file would give other "
            "logits. Use another engine for this model"
        )
    found = [name for name, differs in family.unusual(config).items() if differs]
    if found:
        raise SpecError(f"GGUF export does not support this {found[0]}: {ELSE}")
    return family


def layer_widths(config: Any, family: EngineFamily) -> list[int]:
    """The width of the experts in each layer, (L,); 0 in layers without experts.

    Raises:
        SpecError: the engine does not load such widths, or weights are quantised.
    """
    method = quantisation(config)
    if method not in (None, METHOD):
        raise SpecError(
            f"the checkpoint is stored in the format {method}, which GGUF export does "
            f"not read: export a checkpoint of save_pruned, or {ELSE}"
        )
    kinds = getattr(config, "layers_block_type", None)
    own: Widths = {}
    if method is not None:
        settings = config.quantization_config
        own = widths_by_layer(settings)
        _check_structure(family, settings.get("structure", "ragged"))
    width = getattr(config, family.width)
    return [
        _one_width(own.get(layer, [width]), layer)
        if kinds is None or kinds[layer] == "moe"
        else 0
        for layer in range(config.num_hidden_layers)
    ]


def _check_structure(family: EngineFamily, structure: str) -> None:
    if not family.per_layer:
        by_layer = [f.architecture for f in FAMILIES.values() if f.per_layer]
        raise SpecError(
            f"the structure is {structure}, but llama.cpp reads one width of experts "
            f"for all layers of {family.architecture} (only of {', '.join(by_layer)} "
            "one for each layer): prune with --structure uniform"
        )


def _one_width(widths: list[int], layer: int) -> int:
    if len(set(widths)) > 1:
        raise SpecError(
            f"experts of layer {layer} have widths from {min(widths)} to "
            f"{max(widths)}, but llama.cpp reads one for a layer: prune with "
            "--structure per_layer or uniform"
        )
    if widths[0] == 0:
        raise SpecError(
            f"experts of layer {layer} have no atoms, and llama.cpp reads a width of 0 "
            "as a layer without experts: prune less, or with --structure uniform"
        )
    return widths[0]


def _head_dim(config: Any) -> int:
    """Of the attention's queries, keys and values."""
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _add_heads(writer: Any, config: Any) -> None:
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))


# --- attention and experts in every layer -----------------------------------------


def _unusual(config: Any) -> dict[str, bool]:
    rope = config.rope_parameters or {}
    return {
        "rope_type": rope.get("rope_type", "default") != "default",
        "use_sliding_window": bool(getattr(config, "use_sliding_window", False)),
        "mlp_only_layers": bool(getattr(config, "mlp_only_layers", False)),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", 1) != 1,
        "hidden_act": config.hidden_act != "silu",
    }


def _unusual_qwen2(config: Any) -> dict[str, bool]:
    heads = _head_dim(config) * config.num_attention_heads
    return {
        "head_dim": heads != config.hidden_size,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        **_unusual(config),
    }


def _unusual_olmoe(config: Any) -> dict[str, bool]:
    return {
        # It has a norm over all keys, which it takes to be as many as queries.
        "num_key_value_heads": config.num_key_value_heads != config.num_attention_heads,
        "clip_qkv": config.clip_qkv is not None,
        "attention_bias": bool(config.attention_bias),
        **_unusual_qwen2(config),
    }


def _add_transformer(writer: Any, config: Any, widths: list[int]) -> None:
    _add_heads(writer, config)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_feed_forward_length(widths[0])
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)


# --- Nemotron-H: Mamba-2, attention or experts in a layer -------------------------


def _unusual_nemotron(config: Any) -> dict[str, bool]:
    return {
        "layers_block_type": "mlp" in config.layers_block_type,
        "n_group": config.n_group != 1,
        "mlp_hidden_act": config.mlp_hidden_act != "relu2",
        "mamba_hidden_act": config.mamba_hidden_act != "silu",
        "use_conv_bias": not config.use_conv_bias,
        "time_step_limit": list(config.time_step_limit) != [0.0, float("inf")],
        "num_nextn_predict_layers": config.num_nextn_predict_layers != 0,
    } | {
        name: bool(getattr(config, name))
        for name in ("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias")
    }


def _add_nemotron(writer: Any, config: Any, widths: list[int]) -> None:
    kinds = config.layers_block_type
    keys = config.num_key_value_heads
    _add_heads(writer, config)
    writer.add_feed_forward_length(widths)
    writer.add_head_count_kv([keys * (kind == "full_attention") for kind in kinds])
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    # The package's own function takes one number.
    name = f"{FAMILIES[config.model_type].architecture}.expert_feed_forward_length"
    writer.add_array(name, widths)
    writer.add_expert_shared_feed_forward_length(
        config.moe_shared_expert_intermediate_size
    )
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.moe_latent_size is not None:
        writer.add_moe_latent_size(config.moe_latent_size)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_group_count(config.n_groups)


# --- DeepSeek: dense layers first, shared experts as wide as n routed ones ---------


def _unusual_deepseek(config: Any) -> dict[str, bool]:
    return {
        "attention_bias": bool(config.attention_bias),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "n_shared_experts": not config.n_shared_experts,
        "moe_layer_freq": getattr(config, "moe_layer_freq", 1) != 1,
        "hidden_act": config.hidden_act != "silu",
    }


def _unusual_deepseek_v1(config: Any) -> dict[str, bool]:
    heads = _head_dim(config) * config.num_attention_heads
    return {
        "head_dim": heads != config.hidden_size,
        "rope_type": config.rope_parameters.get("rope_type", "default") != "default",
        **_unusual_deepseek(config),
    }


def _unusual_latent(config: Any) -> dict[str, bool]:
    rope = config.rope_parameters
    yarn = rope.get("rope_type", "default") == "yarn"
    return {
        "rope_type": rope.get("rope_type", "default") not in ("default", "yarn"),
        # It takes both to be the same, and attention_factor to follow from them.
        "mscale": yarn
        and not (rope.get("mscale_all_dim") == rope.get("mscale") not in (None, 0)),
        "attention_factor": yarn and rope.get("attention_factor") not in (None, 1.0),
        "truncate": yarn and not rope.get("truncate", True),
        "factor": yarn and rope.get("factor") is None,
        # It knows models without one by their number of layers.
        "q_lora_rank": config.num_hidden_layers in (26, 27)
        and config.q_lora_rank is not None,
        **_unusual_deepseek(config),
    }


def _unusual_deepseek_v2(config: Any) -> dict[str, bool]:
    return {
        # It has DeepSeek-V3's, by the two best of a group.
        "topk_method": config.topk_method != "greedy",
        "norm_topk_prob": bool(config.norm_topk_prob),
        **_unusual_latent(config),
    }


def _unusual_deepseek_v3(config: Any) -> dict[str, bool]:
    return {
        "rope_interleave": not config.rope_interleave,
        **_unusual_latent(config),
    }


def _add_deepseek(writer: Any, config: Any, widths: list[int]) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_feed_forward_length(widths[-1])
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)


def _add_deepseek_v1(writer: Any, config: Any, widths: list[int]) -> None:
    _add_heads(writer, config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(_head_dim(config))
    _add_deepseek(writer, config, widths)


def _add_latent(writer: Any, config: Any, widths: list[int]) -> None:
    """With keys and values as the engine keeps them: of one head, compressed."""
    latent, rotary = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config.q_lora_rank or 0)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotary)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotary)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rotary)
    _add_deepseek(writer, config, widths)
    rope = config.rope_parameters
    if rope.get("rope_type") == "yarn":
        _add_yarn(writer, rope)


def _add_yarn(writer: Any, rope: Mapping[str, Any]) -> None:
    writer.add_string(f"{_LATENT}.rope.scaling.type", "yarn")
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32))
    writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1))
    # A tenth of it, which the engine undoes.
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_deepseek_v2(writer: Any, config: Any, widths: list[int]) -> None:
    _add_latent(writer, config, widths)
    writer.add_uint32(f"{_LATENT}.expert_gating_func", _SOFTMAX)


def _add_deepseek_v3(writer: Any, config: Any, widths: list[int]) -> None:
    _add_latent(writer, config, widths)
    writer.add_uint32(f"{_LATENT}.expert_gating_func", _SIGMOID)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    if (config.n_group or 1) > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _interleaved(rows: Tensor, n_heads: int) -> Tensor:
    """Rows of a head with those that are rotated together next to each other."""
    halves: Tensor = rows.unflatten(0, (n_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def _by_head(rows: Tensor, config: Any) -> Tensor:
    """Keys and values from the latent ones, (heads, key and value, latent)."""
    heads: Tensor = rows.unflatten(0, (config.num_attention_heads, -1))
    return heads


_LATENT = "deepseek2"
_SOFTMAX, _SIGMOID = 1, 2
"""Numbers of llama.cpp's `llama_expert_gating_func_type`."""
_OF_LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "n_experts": "n_routed_experts",
        "splits": {
            "kv_b_proj.weight": {
                "k_b_proj.weight": lambda rows, config: _by_head(rows, config)[
                    :, : config.qk_nope_head_dim
                ].transpose(1, 2),
                "v_b_proj.weight": lambda rows, config: _by_head(rows, config)[
                    :, config.qk_nope_head_dim :
                ],
            }
        },
    }
)


FAMILIES: Mapping[str, EngineFamily] = MappingProxyType(
    {
        "qwen2_moe": EngineFamily(
            "qwen2moe", _unusual_qwen2, _add_transformer, normalises_top_k=False
        ),
        "qwen3_moe": EngineFamily(
            "qwen3moe", _unusual, _add_transformer, normalises_top_k=True
        ),
        "olmoe": EngineFamily(
            "olmoe",
            _unusual_olmoe,
            _add_transformer,
            normalises_top_k=False,
            width="intermediate_size",
        ),
        "deepseek": EngineFamily(
            "deepseek",
            _unusual_deepseek_v1,
            _add_deepseek_v1,
            normalises_top_k=False,
            n_experts="n_routed_experts",
            changes={
                ".q_proj.weight": lambda rows, config: _interleaved(
                    rows, config.num_attention_heads
                ),
                ".k_proj.weight": lambda rows, config: _interleaved(
                    rows, config.num_key_value_heads
                ),
            },
        ),
        "deepseek_v2": EngineFamily(
            _LATENT, _unusual_deepseek_v2, _add_deepseek_v2, **_OF_LATENT
        ),
        "deepseek_v3": EngineFamily(
            _LATENT,
            _unusual_deepseek_v3,
            _add_deepseek_v3,
            names={r"_correction_bias$": "_correction.bias"},
            **_OF_LATENT,
        ),
        "nemotron_h": EngineFamily(
            "nemotron_h_moe",
            _unusual_nemotron,
            _add_nemotron,
            n_experts="n_routed_experts",
            norm_eps="layer_norm_epsilon",
            per_layer=True,
            names={
                r"backbone\.(layers\.\d+)\.mixer\.experts": r"model.\1.mlp.experts",
                r"\.dt_bias$": ".dt.bias",
                r"_correction_bias$": "_correction.bias",
            },
            changes={
                ".A_log": lambda tensor, _: -tensor.float().exp()[:, None],
                ".D": lambda tensor, _: tensor[:, None],
                ".conv1d.weight": lambda tensor, _: tensor.squeeze(1),
                ".mixer.norm.weight": lambda tensor, config: tensor.reshape(
                    config.n_groups, -1
                ),
            },
        ),
    }
)
"""By transformers' `model_type`."""
