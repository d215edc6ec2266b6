"""DeepSeekMoE token by token, from tensors with the published names.

Written from the paper (Dai et al., 2024) and the published configuration. Nothing here
shares code with the package or with transformers. Norms and rotary angles are computed
in float32, as published; all else is in the type of the tensors.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


def logits(tensors: Tensors, config: Mapping[str, Any], ids: list[int]) -> torch.Tensor:
    """Logits of one window, (L, d_vocab)."""
    x = torch.stack([tensors["model.embed_tokens.weight"][token] for token in ids])
    for number in range(config["num_hidden_layers"]):
        own = _of(tensors, f"model.layers.{number}.")
        normed = _norm(x, own["input_layernorm.weight"], config)
        x = x + _attention(_of(own, "self_attn."), config, normed)
        normed = _norm(x, own["post_attention_layernorm.weight"], config)
        mlp = _of(own, "mlp.")
        routed = number >= config["first_k_dense_replace"]
        routed = routed and number % config["moe_layer_freq"] == 0
        made = [moe(mlp, config, t) if routed else _mlp(mlp, t) for t in normed]
        x = x + torch.stack(made)
    return _norm(x, tensors["model.norm.weight"], config) @ tensors["lm_head.weight"].T


def moe(own: Tensors, config: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Shared and routed experts of one token, (D,)."""
    n_experts, top_k = config["n_routed_experts"], config["num_experts_per_tok"]
    powers = [(own["gate.weight"][e] @ x).exp() for e in range(n_experts)]
    weights = [power / sum(powers) for power in powers]
    chosen = sorted(range(n_experts), key=lambda e: -float(weights[e]))[:top_k]
    whole = sum(weights[e] for e in chosen) if config["norm_topk_prob"] else 1
    total = torch.zeros_like(x)
    for e in chosen:
        weight = config["routed_scaling_factor"] * weights[e] / whole
        total = total + weight * _mlp(_of(own, f"experts.{e}."), x)
    if config["n_shared_experts"]:
        total = total + _mlp(_of(own, "shared_experts."), x)
    return total


def _of(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    found = {n: t for n, t in tensors.items() if n.startswith(prefix)}
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def _mlp(own: Tensors, x: torch.Tensor) -> torch.Tensor:
    gate, up = own["gate_proj.weight"] @ x, own["up_proj.weight"] @ x
    return own["down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)


def _norm(
    x: torch.Tensor, weight: torch.Tensor, config: Mapping[str, Any]
) -> torch.Tensor:
    single = x.float()
    mean = (single * single).mean(-1, keepdim=True)
    return weight * (single * torch.rsqrt(mean + config["rms_norm_eps"])).to(x.dtype)


def _attention(
    own: Tensors, config: Mapping[str, Any], x: torch.Tensor
) -> torch.Tensor:
    n_heads, n_groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = own["q_proj.weight"].shape[0] // n_heads
    queries, keys, values = (x @ own[f"{n}_proj.weight"].T for n in "qkv")
    heads = []
    for head in range(n_heads):
        group = head * n_groups // n_heads
        mine = slice(head * width, (head + 1) * width)
        shared = slice(group * width, (group + 1) * width)
        q = _rotated(queries[:, mine], config)
        k, v = _rotated(keys[:, shared], config), values[:, shared]
        rows = []
        for t in range(len(x)):
            powers = (k[: t + 1] @ q[t] / math.sqrt(width)).exp()
            rows.append(powers / powers.sum() @ v[: t + 1])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ own["o_proj.weight"].T


def _rotated(x: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    half = x.shape[1] // 2
    turns = 1 / config["rope_theta"] ** (
        torch.arange(0, 2 * half, 2).float() / 2 / half
    )
    angles = torch.arange(len(x)).float()[:, None] * turns
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)
