"""The second device fails where a GPU would, and computes what the CPU computes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from devices import GPU
from families import tiny_ids, tiny_model
from keeps import random_keep
from torch import nn

from heapr_lab.models.experts import find_experts
from heapr_lab.pruning.surgery import masking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU != "second", reason="of the device that is made of the CPU"),
]
HERE, THERE = torch.arange(6.0).reshape(2, 3), "second"
ROWS = torch.tensor([0, 1])


def there(*shape: int) -> torch.Tensor:
    """A tensor of the device, with a gradient."""
    return torch.ones(shape, device=THERE, requires_grad=True)


class _Left(torch.autograd.Function):
    """Its backward pass, which runs in a thread of the device, has left a tensor."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        """The same tensor."""
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        """The gradient times a tensor that is on the CPU by mistake."""
        return grad * HERE


MIXED: dict[str, Callable[[], Any]] = {
    "the CPU's, in place": lambda: torch.zeros(2, 3).add_(there(2, 3).detach()),
    "backward": lambda: _Left.apply(there(2, 3)).sum().backward(),
    "rows": lambda: there(4, 3).index_select(0, ROWS),
    "indices into": lambda: ROWS.to(THERE).index_put((ROWS,), ROWS),
    "a stack of numbers": lambda: torch.stack([there(), torch.tensor(1.0)]),
    "a generator": lambda: torch.rand(3, device=THERE, generator=torch.Generator()),
    "NumPy": lambda: np.asarray(there(2, 3).detach()),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_what_is_left_on_the_cpu_is_an_error(mix):
    """It is an error as on CUDA."""
    with pytest.raises((RuntimeError, TypeError)):
        mix()


def test_it_passes_for_a_gpu():
    """Parameters, outputs and gradients say `is_cuda`, on which code branches."""
    layer: Any = nn.Linear(3, 2).to(THERE)
    out = layer(there(2, 3))
    out.sum().backward()
    assert all(x.is_cuda for x in (layer.weight, out, layer.weight.grad))


def test_a_tensor_that_is_left_behind_is_found():
    """In a model: ids, an expert's weights, and what replaces them."""
    model: Any = tiny_model("qwen3_moe").to(THERE)
    ids = tiny_ids()
    with pytest.raises(RuntimeError, match="tensors of the CPU among those of second"):
        model(ids)
    model(ids.to(THERE))
    keep, (layer, *_) = random_keep(model), find_experts(model)
    down = layer.module.down_proj
    with masking(model, keep, {layer.layer: down.detach()}):
        model(ids.to(THERE))
    layer.module.down_proj = nn.Parameter(down.detach().cpu())
    with pytest.raises(RuntimeError, match="tensors of the CPU among those of second"):
        model(ids.to(THERE))
