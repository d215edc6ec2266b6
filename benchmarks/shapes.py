"""The models of the paper in their true shapes, with random weights and tokens.

DeepSeekMoE-16B is a Qwen2-MoE of its sizes here. That has one more row in each MoE
layer, the gate of the shared experts; the router is the same.
"""

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    family: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    n_experts: int
    top_k: int
    d_inter: int
    d_vocab: int
    d_shared: int = 0
    d_dense: int = 0
    """Width of the first layer's MLP, if it has no experts."""
    head_dim: int = 128

    def narrow(self) -> "Shape":
        """The same with a sixteenth of each width, and a small vocabulary."""
        widths = ("d_model", "d_inter", "d_shared", "d_dense", "head_dim")
        sizes = {name: getattr(self, name) // 16 for name in widths}
        return dataclasses.replace(self, d_vocab=512, **sizes)

    def config(self, n_layers: int, dtype: torch.dtype | None = None) -> Any:
        """The configuration of a model with the first `n_layers` layers."""
        return AutoConfig.for_model(
            self.family,
            vocab_size=self.d_vocab,
            hidden_size=self.d_model,
            intermediate_size=self.d_dense or self.d_inter,
            moe_intermediate_size=self.d_inter,
            shared_expert_intermediate_size=self.d_shared,
            num_hidden_layers=n_layers,
            mlp_only_layers=[0] if self.d_dense else [],
            num_experts=self.n_experts,
            num_experts_per_tok=self.top_k,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=4096,
            norm_topk_prob=self.family == "qwen3_moe",
            tie_word_embeddings=False,
            use_cache=False,
            dtype=dtype,
        )


SHAPES = {
    "DeepSeekMoE-16B": Shape(
        "qwen2_moe", 28, 2048, 16, 16, 64, 6, 1408, 102400, 2816, 10944
    ),
    "Qwen2-57B-A14B": Shape("qwen2_moe", 28, 3584, 28, 4, 64, 8, 2560, 151936, 20480),
    "Qwen1.5-MoE-A2.7B": Shape(
        "qwen2_moe", 24, 2048, 16, 16, 60, 4, 1408, 151936, 5632
    ),
    "Qwen3-30B-A3B": Shape("qwen3_moe", 48, 2048, 32, 4, 128, 8, 768, 151936),
}


def random_model(config: Any, *, dtype: torch.dtype, device: str) -> Any:
    """A model in eval mode that is made on the device, without gradients of weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def random_ids(d_vocab: int, *size: int) -> torch.Tensor:
    """Random token ids, the same whenever they are asked for."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(d_vocab, size, generator=generator)


def n_parameters(shape: Shape, n_layers: int) -> int:
    """Parameters of a model with the first `n_layers` layers."""
    per_layer = _count(shape, 3) - _count(shape, 2)
    return _count(shape, 2) + (n_layers - 2) * per_layer


def depth_within(shape: Shape, n_bytes: float, *, bytes_each: int) -> int:
    """Most layers, at least 2, whose weights are within `n_bytes`."""
    per_layer = (n_parameters(shape, 3) - n_parameters(shape, 2)) * bytes_each
    room = n_bytes - n_parameters(shape, 2) * bytes_each
    return max(2, min(shape.n_layers, 2 + int(room // per_layer)))


def _count(shape: Shape, n_layers: int) -> int:
    config = shape.config(n_layers)
    model = random_model(config, dtype=torch.bfloat16, device="meta")
    return sum(p.numel() for p in model.parameters())


def write_checkpoint(
    shape: Shape, n_layers: int, folder: Path, *, dtype: torch.dtype, device: str
) -> int:
    """A checkpoint as the hub has it, with a shard for each layer; returns its bytes.

    The first two layers are random; every further one has the weights of the second.
    """
    tensors: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory(dir=folder) as first:
        random_model(shape.config(2), dtype=dtype, device=device).save_pretrained(first)
        for path in Path(first).glob("*.safetensors"):
            tensors |= load_file(path)
    shape.config(n_layers, dtype).save_pretrained(folder)
    shards = [{name: t for name, t in tensors.items() if ".layers." not in name}]
    for number in range(n_layers):
        old, new = f".layers.{min(number, 1)}.", f".layers.{number}."
        shards.append({n.replace(old, new): t for n, t in tensors.items() if old in n})
    weight_map: dict[str, str] = {}
    n_bytes = 0
    for number, shard in enumerate(shards):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        n_bytes += sum(t.nbytes for t in shard.values())
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return n_bytes
