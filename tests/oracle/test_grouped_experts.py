"""Levels of grouped products give what ragged experts give, one after the other."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, tiny_ids, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from keeps import logits_of, random_keep
from torch import nn

from heapr_lab.checkpoints.convert import quantise_model
from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts, sliced_experts
from heapr_lab.models.grouped_experts import (
    LEVEL_COST,
    MULTIPLE,
    GroupedExperts,
    group_experts,
    levels_of,
)
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import prune

pytestmark = pytest.mark.oracle

IDS = tiny_ids()


def pruned(family: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """With experts of all widths, 0 among them."""
    model = tiny_model(family, dtype=dtype, **sizes)
    return prune(model, random_keep(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits(family: str) -> None:
    """In every layout of experts."""
    model = pruned(family)
    expected = logits_of(model, IDS)
    found = logits_of(group_experts(model), IDS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not sliced_experts(model)


def layer(widths: list[int], dtype: torch.dtype = torch.float32) -> Any:
    """Ragged experts of `widths`, of which the greatest is 64, with output biases."""
    model = tiny_model("qwen3_moe", dtype=dtype, moe_intermediate_size=64)
    kept = np.arange(64)[None] < np.array(widths)[:, None]
    arrays = {found.layer: kept for found in find_experts(model)}
    module = next(iter(sliced_experts(prune(model, KeepMask(arrays, {}))).values()))
    assert module.heapr_widths == widths
    biases = torch.randn(len(widths), module.d_expert, dtype=dtype)
    module.down_bias = nn.Parameter(biases)
    return module.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "widths", [[64, 13, 0, 32], [0, 0, 0, 5], [64] * 4, [0] * 4], ids=str
)
@pytest.mark.parametrize("n_tokens", [0, 1, 9])
def test_one_layer(widths: list[int], n_tokens: int, dtype: torch.dtype) -> None:
    """Any widths and numbers of tokens, with slots that no expert runs (4)."""
    torch.manual_seed(0)
    module = layer(widths, dtype)
    grouped = GroupedExperts(module)
    x = torch.randn(n_tokens, module.d_expert, dtype=dtype)
    ids = torch.randint(5, (n_tokens, 2))
    p = torch.rand(n_tokens, 2, dtype=dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    close = close or {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(grouped(x, ids, p), module(x, ids, p), **close)


def test_compiled_in_one_graph() -> None:
    """Nothing waits for numbers of tokens, also when these change."""
    dtype = torch.bfloat16  # the only one that torch can trace
    module = layer([64, 13, 0, 32], dtype)
    grouped = GroupedExperts(module)
    compiled = torch.compile(grouped, fullgraph=True, backend="eager", dynamic=True)
    for n_tokens in (3, 7):
        x = torch.randn(n_tokens, module.d_expert, dtype=dtype)
        ids, p = torch.randint(4, (n_tokens, 2)), torch.rand(n_tokens, 2).to(dtype)
        found = compiled(x, ids, p)
        torch.testing.assert_close(found, grouped(x, ids, p), rtol=0, atol=0)


@pytest.mark.gpu
def test_captured_on_a_gpu() -> None:
    """A CUDA graph that is replayed with other tokens and experts."""
    module = layer([64, 13, 0, 32], torch.bfloat16).cuda()
    grouped = GroupedExperts(module)
    size = (7, module.d_expert)
    x = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(4, (7, 2), device="cuda")
    p = torch.rand(7, 2, dtype=torch.bfloat16, device="cuda")
    grouped(x, ids, p)  # what is allocated once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped(x, ids, p)
    for _ in range(2):
        x.copy_(torch.randn(size))
        ids.copy_(torch.randint(4, (7, 2)))
        graph.replay()
        torch.testing.assert_close(out, module(x, ids, p), rtol=0.05, atol=0.05)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_levels_are_the_best(widths: list[int]) -> None:
    """Of all ways to cut at rounded widths, the one of least cost."""
    bounds = sorted({-(-w // MULTIPLE) * MULTIPLE for w in widths if w})

    def cost(cuts: tuple[int, ...]) -> int:
        ends = [0, *cuts]
        padded = sum(
            (end - start) * sum(w > start for w in widths)
            for start, end in itertools.pairwise(ends)
        )
        return padded + LEVEL_COST * len(widths) * len(cuts)

    ways = [
        (*inner, bounds[-1])
        for n in range(len(bounds))
        for inner in itertools.combinations(bounds[:-1], n)
    ] or [()]
    found = levels_of(widths)
    assert found[0] == 0
    assert cost(tuple(found[1:])) == min(map(cost, ways))


def test_what_is_refused(tmp_path: Path) -> None:
    """Other dtypes, dense and quantised models; and to be saved afterwards."""
    with pytest.raises(SpecError, match="0 layers of ragged experts"):
        group_experts(tiny_model("qwen3_moe"))
    with pytest.raises(SpecError, match=r"in torch\.float64: expected"):
        group_experts(pruned("qwen3_moe", torch.float64))
    model = pruned("qwen3_moe", hidden_size=64)
    quantise_model(model, "int8")
    with pytest.raises(SpecError, match="are int8"):
        group_experts(model)
    grouped = group_experts(pruned("qwen3_moe"))
    with pytest.raises(SpecError, match="carries no keep mask"):
        save_pruned(grouped, tmp_path / "out")
    with pytest.raises(SpecError, match="arranged for inference"):
        grouped.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
