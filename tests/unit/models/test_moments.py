"""Sums over routed rows: both ways of adding them up, and what a GPU waits for."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from devices import GPU, needs_cuda
from families import tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from heapr_lab.models import moments
from heapr_lab.models.experts import find_experts
from heapr_lab.models.grouped_linear import rows_of_experts
from heapr_lab.models.hooks import probed
from heapr_lab.models.moments import MAXIMA, SUMS, at_once, one_by_one

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


def twin(h: Any, g: Any, p: Any, tokens: Any) -> dict[str, np.ndarray]:
    """The slow twin: numpy's sums and maxima of each expert's rows."""
    h, g, p = h.double().numpy(), g.double().numpy(), p.double().numpy()[:, None]
    ends = np.cumsum(tokens.numpy())[:-1]
    terms = {
        "sum_h2": h**2,
        "sum_g2": g**2,
        "sum_hg": h * g,
        "sum_hg2": (h * g) ** 2,
        "sum_abs_h": abs(h),
        "sum_ph2": (p * h) ** 2,
        "max_abs_h": abs(h),
        "max_abs_ph": abs(p * h),
    }
    return {
        name: np.stack(
            [
                part.sum(0) if name in SUMS else part.max(0, initial=0)
                for part in np.split(values, ends)
            ]
        )
        for name, values in terms.items()
    }


@pytest.mark.parametrize("reduce", [one_by_one, at_once])
@pytest.mark.parametrize("tokens", ROUTINGS.values(), ids=list(ROUTINGS))
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)],
)
def test_both_ways_give_the_sums(
    reduce: Any, tokens: list[int], dtype: torch.dtype, rtol: float
) -> None:
    """Expert by expert and all at once, with experts without tokens."""
    given = rows(tokens, dtype)
    sums, maxima = reduce(*given)
    totals = dict(zip(SUMS + MAXIMA, [*sums, *maxima], strict=True))
    assert sums.dtype == maxima.dtype == given[2].dtype
    for name, expected in twin(*given).items():
        atol = rtol * max(abs(expected).max(), 1)  # terms of sum_hg have both signs
        np.testing.assert_allclose(
            totals[name].double(), expected, rtol=rtol, atol=atol, err_msg=name
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_gradient_shows_in_its_own_expert(value: float) -> None:
    """The check of a pass reads `sum_hg2`: it must not be lost, nor spread."""
    h, g, p, tokens = rows([2, 0, 3])
    g[3, 1] = value
    sums, _ = at_once(h, g, p, tokens)
    broken = ~torch.isfinite(sums[SUMS.index("sum_hg2")])
    assert broken.nonzero().tolist() == [[2, 1]]


class Calls(TorchDispatchMode):
    """Counts calls of ATen operators other than views and allocations."""

    FREE = ("view", "slice", "select", "empty", "transpose", "unsqueeze", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if not name.startswith(self.FREE):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def calls(reduce: Any, n_experts: int) -> Counter[str]:
    """Operators of one batch whose rows are spread over the experts."""
    given = rows([3] * n_experts)
    with Calls() as counted:
        reduce(*given)
    return counted.found


def test_calls_do_not_grow_with_experts() -> None:
    """All at once takes as many kernels for 128 experts as for 2, and few."""
    few, many = calls(at_once, 2), calls(at_once, 128)
    assert many == few
    assert many.total() <= 40
    assert calls(one_by_one, 128).total() > 20 * many.total()


def test_the_host_is_not_asked() -> None:
    """Tensors without values are enough: nothing that a GPU computes is waited for."""
    _, _, _, counts = given = rows([0, 4, 0, 2, 7, 0])
    experts = torch.arange(6).repeat_interleave(counts)
    assert torch.equal(rows_of_experts(experts, 6), counts)
    with FakeTensorMode() as fake:
        h, g, p, tokens = map(fake.from_tensor, given)
        tokens = rows_of_experts(fake.from_tensor(experts), 6)
        assert at_once(h, g, p, tokens)[0].shape == (len(SUMS), 6, D_INTER)
        assert moments._totals(p, tokens).shape == (6,)
        with pytest.raises(DataDependentOutputException):
            one_by_one(h, g, p, tokens)


@pytest.mark.gpu
def test_a_gpu_gives_the_sums() -> None:
    """The same rows there, with experts without tokens."""
    given = rows([300, 0, 1, 511, 256])
    for ours, theirs in zip(
        one_by_one(*given), at_once(*(x.to(GPU) for x in given)), strict=True
    ):
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_is_not_waited_for() -> None:
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
        tokens = probes[layer.layer].moments.experts["tokens"]
    assert tokens.sum() == 128
