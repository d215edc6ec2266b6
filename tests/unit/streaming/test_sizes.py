"""Sizes without weights, against the models themselves, and what fits."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import REPRESENTATIVES, WRAPPERS, tiny_model

from heapr_lab.errors import SpecError
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.models.experts import describe, find_experts
from heapr_lab.models.folders import skeleton_of
from heapr_lab.models.hooks import probed
from heapr_lab.models.likelihood import final_states
from heapr_lab.models.modes import differentiating
from heapr_lab.models.moments import MAXIMA, SUMS
from heapr_lab.streaming.plan import ATOM_BYTES, Sizes, size_of, sizes_of
from heapr_lab.streaming.stream import decoder_layers

LAYER = LayerShape(n_experts=4, d_inter=16, d_expert=4, top_k=2)
MODEL = Architecture(1410, 2, 4, {0: LAYER, 1: LAYER}, 0, 0)
SIZES = Sizes(MODEL, (600, 600), (100, 100), (4, 0))
"""Sizes of no model, with round numbers."""


@pytest.mark.parametrize(
    "kind", [*REPRESENTATIVES, "gemma4", "internvl", "kimi_k25", "qwen3_vl_moe"]
)
def test_sizes_are_those_of_the_model(kind):
    """Layers, embeddings and head; the rest are norms, and the towers of wrappers."""
    model: Any = tiny_model(kind)
    sizes = sizes_of(skeleton_of(model.config))
    assert sizes.model == describe(model)
    counts = [sum(p.numel() for p in b.parameters()) for b in decoder_layers(model)]
    assert list(sizes.layers) == counts
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    assert set(sizes.ends) == {end.weight.numel() for end in ends}
    assert len(sizes.ends) == 2 - (ends[0].weight is ends[1].weight)
    assert sizes.outside > 0
    assert kind in WRAPPERS or sizes.outside < min(sizes.layers)


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
def test_what_a_batch_keeps_is_within_the_bound(family):
    """Not less than every tensor that autograd saved, and not three times as much."""
    sizes = WIDE | ({"intermediate_size": 96} if family == "mixtral" else {})
    model: Any = tiny_model(family, dtype=torch.float32, **sizes)
    ids = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    estimate = sizes_of(model)
    bound = estimate.needed(4, ids.numel()) - estimate.needed(4, 0)
    assert kept_bytes(model, ids) <= bound <= 3 * kept_bytes(model, ids)


def test_a_streamed_pass_holds_one_part():
    """Its memory does not grow with depth, but for the sums of the atoms."""
    deeper = replace(MODEL, n_parameters=MODEL.n_parameters + 1200)
    deep = replace(SIZES, model=deeper, layers=SIZES.layers * 2)
    assert SIZES.needed(2, 0) == 2 * 1410 + 128 * ATOM_BYTES
    assert SIZES.needed(2, 0, streamed=True) == 2 * 610 + 128 * ATOM_BYTES
    assert deep.needed(2, 9, streamed=True) == SIZES.needed(2, 9, streamed=True)
    assert deep.needed(2, 9) - deep.needed(2, 0) == 2 * (
        SIZES.needed(2, 9) - SIZES.needed(2, 0)
    )
    wider = replace(MODEL, n_parameters=MODEL.n_parameters + 800)
    wide = replace(SIZES, model=wider, ends=(900, 100))
    assert wide.needed(2, 0, streamed=True) == 2 * 910 + 128 * ATOM_BYTES
    assert 8 * len(SUMS + MAXIMA) == ATOM_BYTES


@pytest.mark.parametrize("size", NO_SIZES)
def test_a_size_that_is_none(size):
    """The message says what was given and what is expected."""
    with pytest.raises(SpecError, match="expected bytes, or a number with a unit"):
        size_of(size)


def test_sizes_as_texts():
    """Decimal and binary units, in any case, with or without a space."""
    texts = {"5": 5, "2kb": 2000, "2 KiB": 2048, "1.5MB": 1_500_000, "1TiB": 2**40}
    assert {text: size_of(text) for text in texts} == texts
    assert size_of(0, least=0) == 0
