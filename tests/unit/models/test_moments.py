"""Sums over routed rows: both ways of adding them up, and what a GPU waits for."""

from typing import Any

import pytest
import torch
from devices import GPU, needs_cuda
from families import tiny_model
from processes import interpreted
from torch._subclasses.fake_tensor import FakeTensorMode

from heapr_lab.models.experts import find_experts
from heapr_lab.models.grouped_linear import rows_of_experts
from heapr_lab.models.hooks import probed
from heapr_lab.models.moments import SUMS, LayerMoments, one_by_one

D_INTER = 5
ROUTINGS = {
    "even": [3, 3, 3, 3],
    "some without tokens": [0, 4, 0, 0, 7, 0],
    "longer than a piece": [300, 0, 1, 511, 256],
    "ends at the end of a piece": [256, 256],
    "one for all": [0, 0, 1000],
    "one expert": [17],
}


def rows(tokens: list[int], dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """h, g, p and tokens of random rows."""
    generator = torch.Generator().manual_seed(0)
    size = sum(tokens), D_INTER
    h, g = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    p = torch.randn(size[0], generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return h, g, p.to(wide), torch.tensor(tokens)


def by_hand(h: Any, g: Any, p: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Sums and maxima of each expert's rows in float64, (7, E, I); 0 without rows."""
    h, g, p = h.double(), g.double(), p.double()[:, None]
    terms = [h**2, g**2, h * g, (h * g) ** 2, (p * h) ** 2, h.abs(), (p * h).abs()]
    zero = torch.zeros(len(terms), 1, D_INTER).double()
    parts = torch.stack(terms).split(tokens.tolist(), 1)
    reduced = [[x[:5].sum(1), torch.cat([x, zero], 1)[5:].amax(1)] for x in parts]
    return torch.stack([torch.cat(each) for each in reduced], 1)


def check(reduce: Any, device: str, dtype: torch.dtype, tokens: list[int]) -> None:
    """Sums and maxima are those by hand, in the type of the routing weights."""
    given = rows(tokens, dtype)
    totals = torch.cat(reduce(*(x.to(device) for x in given))).cpu()
    assert totals.dtype == given[2].dtype
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    for total, expected in zip(totals.double(), by_hand(*given), strict=True):
        atol = rtol * max(expected.abs().max().item(), 1)  # terms of sum_hg have signs
        torch.testing.assert_close(total, expected, rtol=rtol, atol=atol)


DTYPES = (torch.float64, torch.float32, torch.bfloat16)
of_rows = pytest.mark.parametrize("tokens", ROUTINGS.values(), ids=ROUTINGS)


@of_rows
@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_by_expert(tokens, dtype):
    """Also with experts without tokens, and weights below 0."""
    check(one_by_one, "cpu", dtype, tokens)


@pytest.mark.gpu
@needs_cuda
@of_rows
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel(tokens, dtype):
    """All experts at once, compiled for the GPU."""
    kernel = pytest.importorskip("heapr_lab.models.moments_kernel")
    check(kernel.at_once, GPU, dtype, tokens)


def test_the_kernel_interpreted():
    """The same kernel on the CPU, where Triton is installed."""
    pytest.importorskip("triton", minversion="3.7")
    code = (
        "from test_moments import DTYPES, ROUTINGS, check\n"
        "from heapr_lab.models.moments_kernel import at_once\n"
        "for dtype in DTYPES:\n"
        "    for tokens in ROUTINGS.values():\n"
        "        check(at_once, 'cpu', dtype, tokens)"
    )
    interpreted(code, __file__)


def test_products_of_bfloat16_are_in_float32():
    """Those of one batch, which sums in float64 would not make exact again."""
    h, g, p, tokens = rows([0, 4, 7], torch.bfloat16)
    moments = LayerMoments(len(tokens), D_INTER, h.device)
    moments.add(h, g, p, tokens)
    totals = torch.stack([*moments.atoms.values()])
    exact = by_hand(h, g, p, tokens)
    torch.testing.assert_close(totals, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_gradient_shows_in_its_own_expert(value):
    """The check of a pass reads `sum_hg2`: it must not be lost, nor spread."""
    h, g, p, tokens = rows([2, 0, 3])
    g[3, 1] = value
    sums, _ = one_by_one(h, g, p, tokens)
    broken = ~torch.isfinite(sums[SUMS.index("sum_hg2")])
    assert broken.nonzero().tolist() == [[2, 1]]


def test_the_host_is_not_asked():
    """Tensors without values are enough to count the rows of each expert."""
    counts = torch.tensor([0, 4, 0, 2, 7, 0])
    experts = torch.arange(6).repeat_interleave(counts)
    assert torch.equal(rows_of_experts(experts, 6), counts)
    with FakeTensorMode() as fake:
        assert rows_of_experts(fake.from_tensor(experts), 6).shape == (6,)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_gpu_is_not_waited_for():
    """Forward and backward through measured experts, with waiting made an error."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16).cuda()
    (layer, *_) = find_experts(model)
    x = torch.randn(64, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.rand(64, 4, device="cuda").topk(2)
    weights = chosen.values.to(torch.bfloat16)
    with probed([layer]) as probes:
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer.module(x, chosen.indices, weights).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        tokens = probes[layer.layer].tokens
    assert tokens.sum() == 128
