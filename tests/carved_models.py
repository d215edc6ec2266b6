"""A tiny dense model of one expert a layer, and what is carved from it."""

from typing import Any

import torch
from families import tiny_model

from benchmarks.lab_model.carved_ffn import CarvedFfn, dense_ffns
from benchmarks.lab_model.carving import carve
from benchmarks.lab_model.smolmoe import described as described_by
from benchmarks.lab_model.smolmoe import rounded_change
from heapr_lab.pretrained.carved import Carved, Layout

D_VOCAB = 31


def one_expert_model(d_ff: int = 24, dtype: torch.dtype = torch.float64) -> Any:
    """A Mixtral with one expert in each of two layers, at random."""
    one = dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok"), 1)
    sizes = {"vocab_size": D_VOCAB, "intermediate_size": d_ff} | one
    single = {"dtype": torch.float32, "tie_word_embeddings": True}
    return tiny_model("mixtral", **sizes, **single).to(dtype)  # of the same numbers


def one_expert_state(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a `dense_model`, by the names of Mixtral's files."""
    state = {}
    for name, tensor in model.state_dict().items():
        if ".mlp." not in name:
            state[name] = tensor
            continue
        layer, _, matrix = name.partition(".mlp.")
        theirs = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[matrix]
        state[f"{layer}.block_sparse_moe.experts.0.{theirs}.weight"] = tensor
    return state


def dense_model(d_ff: int = 24) -> Any:
    """The same with plain feed-forward layers."""
    model = one_expert_model(d_ff)
    dense_ffns(model)
    return model


def student_of(dense: Any, layout: Layout) -> Any:
    """A model carved from `dense`."""
    ids = torch.randint(D_VOCAB, (4, 40), generator=torch.Generator().manual_seed(0))
    carvings = carve(dense, ids, layout)
    student = one_expert_model(layout.d_ff)
    dense_ffns(student)
    for layer, carving in zip(student.model.layers, carvings, strict=True):
        layer.mlp = CarvedFfn(layer.mlp, carving, layout)
    return student


def described(dense: Any, layout: Layout) -> tuple[Any, Carved]:
    """A carved model whose weights have changed since, and what its file would hold."""
    student = student_of(dense, layout)
    generator = torch.Generator().manual_seed(1)
    for parameter in student.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += 0.05 * noise
    student.model.embed_tokens.weight.data.copy_(dense.model.embed_tokens.weight)
    for layer, other in zip(student.model.layers, dense.model.layers, strict=True):
        layer.self_attn.load_state_dict(other.self_attn.state_dict())
    return student, described_by(student, rounded_change(student, dense), layout)
