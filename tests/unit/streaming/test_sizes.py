"""Sizes from shapes alone, against the models themselves, and what fits."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import REPRESENTATIVES, tiny_model
from wrappers import tiny_wrapper

from heapr_lab.errors import SpecError
from heapr_lab.models.experts import describe, find_experts
from heapr_lab.models.hooks import probed
from heapr_lab.models.likelihood import final_states
from heapr_lab.models.modes import differentiating
from heapr_lab.models.moments import MAXIMA, SUMS
from heapr_lab.models.safetensors_headers import StoredTensor, read_headers
from heapr_lab.streaming.sizes import (
    ATOM_BYTES,
    Sizes,
    shapes_in,
    size_of,
    sizes_of,
    why_streamed,
)
from heapr_lab.streaming.stream import decoder_layers

SIZES = Sizes((600, 600), (100, 100), 10, {0: 64, 1: 64}, 8, 4, 2, (4, 0))
"""Sizes of no model, with round numbers."""


def check(sizes: Sizes, model: Any) -> None:
    """The sizes are those that the model itself has."""
    known = describe(model)
    atoms = {number: shape.n_atoms for number, shape in known.layers.items()}
    assert sizes.atoms == atoms
    assert sizes.n_experts == sum(s.n_experts for s in known.layers.values())
    assert sizes.d_model == known.d_model
    assert {sizes.top_k} == {shape.top_k for shape in known.layers.values()}
    blocks = decoder_layers(model)
    assert len(sizes.layers) == len(blocks)
    counts = [sum(p.numel() for p in block.parameters()) for block in blocks]
    buffers = sum(b.numel() for b in model.buffers())
    assert sum(counts) <= sum(sizes.layers) <= sum(counts) + buffers
    assert known.n_parameters <= sizes.n_parameters <= known.n_parameters + buffers


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_sizes_from_files_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    """Files have stored buffers besides the parameters."""
    model: Any = tiny_model(family)
    model.save_pretrained(tmp_path)
    config = model.config.to_dict()
    check(sizes_of(shapes_in(read_headers(tmp_path)[0]), config), model)


@pytest.mark.parametrize("kind", ["gemma4", "internvl", "kimi_k25", "qwen3_vl_moe"])
def test_sizes_of_wrappers(kind: str) -> None:
    """Shapes have the names in the model; towers are outside of its decoder layers."""
    model: Any = tiny_wrapper(kind)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    sizes = sizes_of(shapes, model.config.to_dict())
    check(sizes, model)
    assert sizes.outside > 0


def test_of_quantised_weights_the_numbers_count() -> None:
    """Four bits have two in a byte, scales are none, and extra layers are left out."""
    experts = "model.layers.0.mlp.experts"
    stored = {
        "model.embed_tokens.weight": (10, 32),
        f"{experts}.gate_up_proj_blocks": (4, 16, 2, 8),
        f"{experts}.gate_up_proj_scales": (4, 16, 2),
        f"{experts}.down_proj_blocks": (4, 32, 1, 4),
        "model.layers.1.mlp.experts.0.down_proj.weight": (32, 8),
        "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv": (1, 1),
        "mtp.layers.0.mlp.experts.0.down_proj.weight": (32, 8),
        "model.layers.2.mlp.experts.0.down_proj.weight": (32, 8),
    }
    tensors = {
        name: StoredTensor("F8_E4M3" if ".weight" in name else "U8", shape, 0, 0)
        for name, shape in stored.items()
    }
    config = {"text_config": {"num_experts_per_tok": 4, "num_hidden_layers": 2}}
    sizes = sizes_of(shapes_in({Path("x"): tensors}), config)
    assert sizes.atoms == {0: 4 * 8, 1: 8}
    assert sizes.layers == (4 * 16 * 32 + 4 * 32 * 8, 32 * 8)
    assert (sizes.n_experts, sizes.top_k, sizes.outside) == (5, 4, 0)


def test_names_that_are_not_known() -> None:
    """Names of something other than a language model."""
    with pytest.raises(SpecError, match="no embeddings, or no layers, of known names"):
        sizes_of({"conv.weight": (3, 3)}, {})


# --- memory -----------------------------------------------------------------------


NO_SIZES = [
    math.nan, math.inf, 1.5, None, [], "nanGB", "1e400GB", "24 bananas", "GB", "-1GB",
    "", "0", 0, -1, "1.2.3GB",
]  # fmt: skip


def kept_bytes(model: Any, ids: torch.Tensor) -> int:
    """Bytes of everything that autograd keeps, counted once: the slow twin."""
    weights = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    embedded = model.get_input_embeddings().register_forward_hook(
        lambda _module, _args, output: output.requires_grad_()
    )
    with differentiating(model), probed(find_experts(model)), hooks:
        final_states(model, ids)
    embedded.remove()
    return sum(
        tensor.untyped_storage().nbytes()
        for place, tensor in saved.items()
        if place not in weights
    )


WIDE = {"hidden_size": 128, "moe_intermediate_size": 96, "vocab_size": 64}


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "deepseek_v3", "mixtral"])
def test_what_a_batch_keeps_is_within_the_bound(family: str) -> None:
    """Not less than every tensor that autograd saved, and not three times as much."""
    sizes = WIDE | ({"intermediate_size": 96} if family == "mixtral" else {})
    model: Any = tiny_model(family, dtype=torch.float32, **sizes)
    ids = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    estimate = sizes_of(shapes, model.config.to_dict())
    bound = estimate.needed(4, ids.numel()) - estimate.needed(4, 0)
    assert kept_bytes(model, ids) <= bound <= 3 * kept_bytes(model, ids)


def test_a_streamed_pass_holds_one_part() -> None:
    """Its memory does not grow with depth, but for the sums of the atoms."""
    deep = replace(SIZES, layers=SIZES.layers * 2)
    assert SIZES.needed(2, 0) == 2 * 1410 + 128 * ATOM_BYTES
    assert SIZES.needed(2, 0, streamed=True) == 2 * 610 + 128 * ATOM_BYTES
    assert deep.needed(2, 9, streamed=True) == SIZES.needed(2, 9, streamed=True)
    assert deep.needed(2, 9) - deep.needed(2, 0) == 2 * (
        SIZES.needed(2, 9) - SIZES.needed(2, 0)
    )
    wide = replace(SIZES, ends=(900, 100))
    assert wide.needed(2, 0, streamed=True) == 2 * 910 + 128 * ATOM_BYTES
    assert 8 * len(SUMS + MAXIMA) == ATOM_BYTES


def test_what_needs_more_than_75_per_cent_is_streamed() -> None:
    """So is what is dequantised, whatever is free."""
    needed = SIZES.needed(4, 7)
    assert why_streamed(SIZES, 4, 7, needed / 0.74, method=None) is None
    why = why_streamed(SIZES, 4, 7, needed / 0.76, method=None)
    assert "scores may take 75%: those of a window of 7 tokens need" in why
    assert "they are dequantised" in str(why_streamed(SIZES, 4, 7, 1e9, method="fp8"))


@pytest.mark.parametrize("size", NO_SIZES)
def test_a_size_that_is_none(size: Any) -> None:
    """The message says what was given and what is expected."""
    with pytest.raises(SpecError, match="expected bytes, or a number with a unit"):
        size_of(size)


def test_sizes_as_texts() -> None:
    """Decimal and binary units, in any case, with or without a space."""
    texts = {"5": 5, "2kb": 2000, "2 KiB": 2048, "1.5MB": 1_500_000, "1TiB": 2**40}
    assert {text: size_of(text) for text in texts} == texts
    assert size_of(0, least=0) == 0
