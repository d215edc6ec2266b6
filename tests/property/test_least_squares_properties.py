"""What must not change which atoms are cheap: the scale of activations, and traffic."""

from dataclasses import replace

import pytest
import torch
from families import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.refinement.activation_grams import LayerGrams
from heapr_lab.refinement.compensation import LayerSolver
from heapr_lab.refinement.elimination import layer_costs

pytestmark = pytest.mark.property

N_EXPERTS, D_INTER = 4, 8
LAYER = find_experts(tiny_model("qwen2_moe"))[0]
CLOSE = {"rtol": 1e-3, "atol": 0.0}  # costs are found in float32


def grams(seed: int, *, span: str, tokens: int = 40) -> LayerGrams:
    """Sums of random, correlated features, each scaled by a power of its own."""
    rng = torch.Generator().manual_seed(seed)
    n_blocks, size = 1, N_EXPERTS * D_INTER
    if span == "expert":
        n_blocks, size = N_EXPERTS, D_INTER
    mixed = torch.randn(n_blocks, size, size, generator=rng).double()
    parts = [
        torch.randn(n_blocks, tokens, size, generator=rng).double() @ mixed
        for _ in range(2)
    ]
    sums = torch.stack([X.mT @ X for X in parts])
    return LayerGrams(span, sums, torch.full((2, N_EXPERTS), tokens))


def scaled(own: LayerGrams, scale: torch.Tensor) -> LayerGrams:
    """The sums with features times `scale` (E, I)."""
    flat = scale.reshape(own.sums.shape[1], -1)
    return replace(own, sums=own.sums * flat[:, :, None] * flat[:, None])


def with_down(down: torch.Tensor) -> ExpertsLayer:
    """The layer of four experts with other columns of W_down (E, D, I)."""
    with torch.no_grad():
        LAYER.down.copy_(down)
    return LAYER


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


@given(st.integers(0, 10**6), st.sampled_from(["expert", "layer"]))
@settings(max_examples=20, deadline=None)
def test_the_scale_of_an_activation_does_not_matter(seed: int, span: str) -> None:
    """Each h times a number and its column divided by it: the same costs and output."""
    own, down = grams(seed, span=span), numbers(seed, N_EXPERTS, 16, D_INTER)
    scale = (3 * numbers(seed + 1, N_EXPERTS, D_INTER)).exp()
    base = numbers(seed + 2, N_EXPERTS, D_INTER).exp()
    kept = numbers(seed + 3, N_EXPERTS, D_INTER) > 0
    found = layer_costs(with_down(down), own, base)
    new, row = LayerSolver(LAYER, own).solve(kept)
    other = scaled(own, scale)
    again = layer_costs(with_down(down / scale[:, None]), other, base)
    torch.testing.assert_close(again, found, **CLOSE)
    newer, other_row = LayerSolver(LAYER, other).solve(kept)
    torch.testing.assert_close(newer * scale[:, None], new, rtol=1e-6, atol=1e-9)
    assert other_row["ridge"] == row["ridge"]


@given(st.integers(0, 10**6), st.integers(0, N_EXPERTS - 1))
@settings(max_examples=20, deadline=None)
def test_traffic_does_not_change_which_atoms_of_an_expert_are_cheap(
    seed: int, expert: int
) -> None:
    """Each of its tokens routed to it twice: what its atoms cost stays in proportion.

    With the price, which then doubles, so do the costs; other experts' stay.
    """
    own, down = grams(seed, span="expert"), numbers(seed, N_EXPERTS, 16, D_INTER)
    twice = torch.ones(N_EXPERTS).double()
    twice[expert] = 2.0
    busier = LayerGrams(
        "expert", own.sums * twice[:, None, None], own.tokens * twice.long()
    )
    base = numbers(seed + 2, N_EXPERTS, D_INTER).exp()
    found = layer_costs(with_down(down), own, base)
    again = layer_costs(LAYER, busier, base * twice[:, None])
    torch.testing.assert_close(again, found * twice[:, None], **CLOSE)
    kept = numbers(seed + 3, N_EXPERTS, D_INTER) > 0
    weights = [LayerSolver(LAYER, some).solve(kept, 0.1)[0] for some in (own, busier)]
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-9)


@given(st.integers(0, 10**6), st.sampled_from(["expert", "layer"]))
@settings(max_examples=20, deadline=None)
def test_the_same_text_twice_changes_nothing(seed: int, span: str) -> None:
    """Neither costs, whose price is a mean, nor weights."""
    own, down = grams(seed, span=span), numbers(seed, N_EXPERTS, 16, D_INTER)
    twice = LayerGrams(span, own.sums * 2, own.tokens * 2)
    base = numbers(seed + 2, N_EXPERTS, D_INTER).exp()
    kept = numbers(seed + 3, N_EXPERTS, D_INTER) > 0
    layer = with_down(down)
    costs = [layer_costs(layer, some, base) for some in (own, twice)]
    torch.testing.assert_close(*costs, **CLOSE)
    solved = [LayerSolver(layer, some).solve(kept) for some in (own, twice)]
    torch.testing.assert_close(solved[0][0], solved[1][0], rtol=1e-6, atol=1e-9)
    assert solved[0][1]["ridge"] == solved[1][1]["ridge"]
