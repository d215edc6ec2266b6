"""Ragged experts run one after the other, and all at once, with the same result."""

from typing import Any

import pytest
import torch
from devices import needs_cuda
from families import REPRESENTATIVES, tiny_ids, tiny_model
from keeps import logits_of, random_keep, widths_keep
from torch import nn

from heapr_lab.checkpoints.convert import quantise_model
from heapr_lab.errors import SpecError
from heapr_lab.models import ragged_experts
from heapr_lab.models.experts import run_ragged, sliced_experts
from heapr_lab.models.ragged_experts import AT_ONCE, LOOP, RaggedExperts
from heapr_lab.pruning.surgery import prune

pytestmark = pytest.mark.oracle

IDS = tiny_ids()
WIDE = {"nemotron_h": torch.float32}
"""Families that do not compute in float64."""


def pruned(family: str, dtype: torch.dtype) -> Any:
    """With experts of all widths, 0 among them."""
    model = tiny_model(family, dtype=dtype)
    return prune(model, random_keep(model))


def both(model: nn.Module, run: Any) -> list[Any]:
    """What `run` gives in either way."""
    found = []
    for way in (LOOP, AT_ONCE):
        run_ragged(model, way)
        found.append(run())
    return found


def gradients(model: Any, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    """Of the loss by all parameters of experts."""
    model.zero_grad()
    own = {
        f"{path}.{name}": parameter.requires_grad_()
        for path, module in sliced_experts(model).items()
        for name, parameter in module.named_parameters()
    }
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad for name, parameter in own.items()}


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_the_same_logits_and_gradients(family: str) -> None:
    """In every layout of experts, with biases and norms where there are."""
    dtype = WIDE.get(family, torch.float64)
    model = pruned(family, dtype)
    close = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {}
    one, other = both(model, lambda: logits_of(model, IDS))
    torch.testing.assert_close(one, other, **close)
    first, second = both(model, lambda: gradients(model))
    assert first.keys() == second.keys()
    assert any(grad is not None and grad.abs().max() > 0 for grad in first.values())
    for name, grad in first.items():
        torch.testing.assert_close(second[name], grad, **close)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_in_bfloat16(family: str) -> None:
    """To its precision."""
    model = pruned(family, torch.bfloat16)
    one, other = both(model, lambda: logits_of(model, IDS))
    torch.testing.assert_close(one, other, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised(kind: str) -> None:
    """Dequantised for the call."""
    model = tiny_model("qwen3_moe", dtype=torch.float32, hidden_size=64)
    small = prune(model, random_keep(model))
    quantise_model(small, kind)
    one, other = both(small, lambda: logits_of(small, IDS))
    torch.testing.assert_close(one, other)


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
        given = [tensor.detach().clone().requires_grad_() for tensor in (x, weight)]
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
        found, expected = run(*given, bias), exact(*wide, bias.double())
        step = torch.finfo(dtype).eps
        assert found.dtype == dtype
        close = {"rtol": step, "atol": 4 * step, "check_dtype": False}
        torch.testing.assert_close(found, expected, **close)
        found.square().sum().backward()
        expected.square().sum().backward()
        for tensor, true in zip(given, wide, strict=True):
            error = (tensor.grad - true.grad).norm()
            assert error <= 4 * step * true.grad.norm()


def test_other_processors_and_dtypes_multiply_as_they_are() -> None:
    """Float32 is only for half precision on a CPU that has no instructions for it."""
    has = ragged_experts.has_fast_products
    assert has(torch.device("cuda"), torch.bfloat16)
    assert has(torch.device("cpu"), torch.float32)
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert has(torch.device("cpu"), torch.bfloat16) == supported


def layer(family: str = "qwen3_moe", *, bias: bool = False) -> RaggedExperts:
    """Of one layer, perhaps with output biases."""
    (module, *_) = sliced_experts(pruned(family, torch.float64)).values()
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
    for way in (LOOP, AT_ONCE):
        module.way = way
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


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    """By the kernels for widths in multiples of 8, against the loop, with gradients."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}
    model = tiny_model(family, dtype=dtype, **sizes)
    keep = widths_keep(model, 16, structure="per_layer")
    small = prune(model, keep).cuda()
    close = {"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {}
    close = close or {"rtol": 1e-3, "atol": 1e-3}
    ids = IDS.cuda()
    one, other = both(small, lambda: logits_of(small, ids))
    torch.testing.assert_close(one, other, **close)
    first, second = both(small, lambda: gradients(small, ids))
    for name, grad in first.items():
        torch.testing.assert_close(second[name], grad, **close)


def test_no_tokens() -> None:
    """Nothing in, nothing out."""
    module = layer()
    x, none = torch.zeros(0, module.d_expert).double(), torch.zeros(0, 2)
    for way in (LOOP, AT_ONCE):
        module.way = way
        assert module(x, none.long(), none.double()).shape == (0, module.d_expert)


def test_the_processor_runs_a_loop() -> None:
    """By default; what is not pruned has no ways, and there is no other way."""
    module = layer()
    assert not module._has_kernel(torch.zeros(1, module.d_expert))
    with pytest.raises(SpecError, match="0 layers of ragged experts"):
        run_ragged(tiny_model("qwen3_moe"), LOOP)
    with pytest.raises(SpecError, match=r"'fast': expected.*loop, at_once"):
        run_ragged(pruned("qwen3_moe", torch.float32), "fast")
