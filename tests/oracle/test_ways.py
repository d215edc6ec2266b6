"""Ragged experts, one after the other, against one atom after the other."""

import pytest
import torch
from families import tiny_model
from keeps import random_keep
from torch import nn

from heapr_lab.models import ragged_experts
from heapr_lab.models.experts import sliced_experts
from heapr_lab.models.ragged_experts import RaggedExperts
from heapr_lab.pruning.surgery import prune

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("n_rows", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_half_precision(
    dtype: torch.dtype, n_rows: int, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of float64 but for the rounding of the result, on any processor.

    So are the gradients, which are sums of up to 40 products.
    """
    monkeypatch.setattr(ragged_experts, "has_fast_products", lambda *_: fast)
    torch.manual_seed(0)
    x = torch.randn(n_rows, 24, dtype=dtype)
    weight, bias = torch.randn(32, 24, dtype=dtype), torch.randn(32, dtype=dtype)
    for run, exact in (
        (ragged_experts.linear, nn.functional.linear),
        (lambda x, w, _: ragged_experts.times(x, w.T), lambda x, w, _: x @ w.T),
    ):
        narrow = [tensor.detach().clone().requires_grad_() for tensor in (x, weight)]
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
        product, expected = run(*narrow, bias), exact(*wide, bias.double())
        step = torch.finfo(dtype).eps
        assert product.dtype == dtype
        close = {"rtol": step, "atol": 4 * step, "check_dtype": False}
        torch.testing.assert_close(product, expected, **close)
        product.square().sum().backward()
        expected.square().sum().backward()
        for tensor, true in zip(narrow, wide, strict=True):
            error = (tensor.grad - true.grad).norm()
            assert error <= 4 * step * true.grad.norm()


def test_other_processors_and_dtypes_multiply_as_they_are() -> None:
    """Float32 is only for half precision on a CPU that has no instructions for it."""
    has = ragged_experts.has_fast_products
    assert has(torch.device("cuda"), torch.bfloat16)
    assert has(torch.device("cpu"), torch.float32)
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert has(torch.device("cpu"), torch.bfloat16) == supported


def layer(*, bias: bool = False) -> RaggedExperts:
    """The ragged experts of one layer, of all widths, perhaps with output biases."""
    model = tiny_model("qwen3_moe", dtype=torch.float64)
    (module, *_) = sliced_experts(prune(model, random_keep(model))).values()
    if bias:
        n_experts, d_expert = len(module.heapr_widths), module.d_expert
        module.down_bias = nn.Parameter(torch.randn(n_experts, d_expert).double())
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("index", [[0, 0], [1, 2], [2, 4], [4, 4]], ids=str)
def test_against_atom_by_atom(index: list[int], bias: bool) -> None:
    """Experts without tokens or without atoms, and slots that no expert runs (4)."""
    torch.manual_seed(0)
    module = layer(bias=bias)
    x = torch.randn(3, module.d_expert, dtype=torch.float64)
    ids, p = torch.tensor([index] * 3), torch.rand(3, 2, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for token in range(3):
        for slot, expert in enumerate(index):
            if expert < len(module.heapr_widths):
                out = by_atoms(module, expert, x[token])
                expected[token] += p[token, slot] * out
    torch.testing.assert_close(module(x, ids, p), expected)


def by_atoms(module: RaggedExperts, expert: int, x: torch.Tensor) -> torch.Tensor:
    """The output of one expert for one token, one atom after the other."""
    start, width = module.starts[expert], module.heapr_widths[expert]
    out = torch.zeros_like(x)
    for atom in range(width):
        gate = module.up_rows[2 * start + atom] @ x
        up = module.up_rows[2 * start + width + atom] @ x
        out += gate * torch.sigmoid(gate) * up * module.down_columns[start + atom]
    return out if module.down_bias is None else out + module.down_bias[expert]


def test_no_tokens() -> None:
    """Nothing in, nothing out."""
    module = layer()
    x, none = torch.zeros(0, module.d_expert).double(), torch.zeros(0, 2)
    assert module(x, none.long(), none.double()).shape == (0, module.d_expert)
