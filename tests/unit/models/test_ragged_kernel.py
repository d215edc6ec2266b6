"""Ragged experts all at once, by a kernel, against one expert after the other."""

import copy
import logging
from unittest.mock import MagicMock

import pytest
import torch
from devices import GPU, needs_cuda
from families import tiny_model
from keeps import random_keep
from processes import interpreted
from torch import nn
from torch.nn.utils import parametrize

from heapr_lab import prune
from heapr_lab.models import ragged_experts
from heapr_lab.models.experts import sliced_experts
from heapr_lab.models.ragged_experts import (
    RaggedExperts,
    infers_in_half,
    kernel_runs,
    routed_sum,
)

FAMILIES = ("qwen3_moe", "gpt_oss", "nemotron_h")
"""With and without a gate, biases and interleaved rows."""
N_TOKENS = (1, 7, 300)


def ragged(family: str, device: str, dtype: torch.dtype) -> RaggedExperts:
    """The experts of a pruned layer, of all widths, one without atoms."""
    model = tiny_model(family, dtype=dtype)
    (module, *_) = sliced_experts(prune(model, random_keep(model))).values()
    assert 0 in module.heapr_widths
    return module.to(device).requires_grad_(False)


def runs(module: RaggedExperts, x: torch.Tensor) -> bool:
    """Whether the kernel takes the tokens."""
    return kernel_runs(x, module._tensors(), module.starts[-1])


def check(family: str, device: str, dtype: torch.dtype) -> None:
    """The kernel is as near to float64 as the loop; some slots have no expert."""
    torch.manual_seed(0)
    module = ragged(family, device, dtype)
    exact, n_experts = copy.deepcopy(module).double(), len(module.heapr_widths)
    for n_tokens in N_TOKENS:
        x = torch.randn(n_tokens, module.d_expert, device=device, dtype=dtype)
        p = torch.rand(n_tokens, 3, device=device, dtype=dtype)
        index = torch.rand(n_tokens, n_experts + 1, device=device).topk(3).indices
        expected = routed_sum(exact._expert, n_experts, x.double(), index, p.double())
        loop = routed_sum(module._expert, n_experts, x, index, p)
        errors = [
            (out - expected).norm() for out in (module.at_once(x, index, p), loop)
        ]
        rounding = 2 * torch.finfo(dtype).eps * expected.norm()
        assert errors[0] <= 1.5 * errors[1] + rounding, (family, n_tokens, errors)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel(family, dtype):
    """Compiled for the GPU, where it is what runs."""
    check(family, GPU, dtype)
    module = ragged(family, GPU, dtype)
    x = torch.randn(5, module.d_expert, device=GPU, dtype=dtype)
    assert runs(module, x)
    assert not runs(module, x.requires_grad_())


def test_the_kernel_interpreted():
    """The same kernel on the CPU, where Triton is; it multiplies no bfloat16 there."""
    pytest.importorskip("triton", minversion="3.7")
    code = (
        "import torch\n"
        "from test_ragged_kernel import FAMILIES, check\n"
        "for dtype in (torch.float32, torch.float16):\n"
        "    for family in FAMILIES:\n"
        "        check(family, 'cpu', dtype)"
    )
    interpreted(code, __file__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_takes_one_expert_after_the_other(dtype):
    """There the kernel does not run, whatever the type."""
    module = ragged("qwen3_moe", "cpu", dtype)
    assert not runs(module, torch.ones(2, module.d_expert, dtype=dtype))


def test_what_is_trained_takes_one_expert_after_the_other():
    """Also an adapter alone, in the place of a parameter that is frozen."""
    module = ragged("qwen3_moe", "cpu", torch.bfloat16)
    x = torch.ones(2, module.d_expert, dtype=torch.bfloat16)
    assert infers_in_half(x, *module._tensors())
    assert not infers_in_half(x.float(), *module._tensors())
    parametrize.register_parametrization(module, "up_rows", _Adapter())
    assert not any(p.requires_grad for p in module.parameters())
    assert not infers_in_half(x, *module._tensors())
    with torch.no_grad():
        assert infers_in_half(x, *module._tensors())


class _Adapter(nn.Module):
    """Adds to a weight what is trained elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return weight + self.delta


def test_without_a_compiler_it_is_said_once(monkeypatch, caplog):
    """The experts still run, one after the other."""
    missing = MagicMock()
    missing.__getitem__.side_effect = RuntimeError("Failed to find C compiler")
    tools = MagicMock(next_power_of_2=lambda n: n, cdiv=lambda a, b: a // b)
    monkeypatch.setattr(ragged_experts, "triton", tools)
    monkeypatch.setattr(ragged_experts, "_multiply", missing, raising=False)
    ragged_experts._compiles.cache_clear()
    with caplog.at_level(logging.WARNING):
        answers = [ragged_experts._compiles(torch.device("cpu")) for _ in range(2)]
    ragged_experts._compiles.cache_clear()
    assert answers == [False, False]
    assert len(caplog.records) == 1
    assert "Failed to find C compiler" in caplog.text
    missing.__getitem__.side_effect = torch.OutOfMemoryError("another time")
    with pytest.raises(torch.OutOfMemoryError):
        ragged_experts._compiles(torch.device("cpu"))
