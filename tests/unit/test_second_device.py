"""The second device fails where a GPU would, and computes what the CPU computes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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


def there(*shape: int) -> torch.Tensor:
    """A tensor of the device, with a gradient."""
    return torch.ones(shape, device=THERE, requires_grad=True)


class _Left(torch.autograd.Function):
    """Its backward pass, which runs in a thread of the device, has left a tensor."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        """On the CPU by mistake."""
        return grad * HERE


MIXED: dict[str, Callable[[], Any]] = {
    "a sum": lambda: there(2, 3) + HERE,
    "a product": lambda: HERE.T @ there(2, 3),
    "in place": lambda: there(2, 3).detach().add_(HERE),
    "the CPU's, in place": lambda: torch.zeros(2, 3).add_(there(2, 3).detach()),
    "a layer": lambda: nn.Linear(3, 2)(there(2, 3)),
    "an embedding": lambda: nn.Embedding(4, 2).to(THERE)(torch.tensor([1])),
    "a choice": lambda: there(2, 3).gather(1, torch.tensor([[1], [0]])),
    "backward": lambda: _Left.apply(there(2, 3)).sum().backward(),
    "a mask of floats": lambda: there(2, 3)[HERE.to(torch.uint8)],
    "a loss": lambda: F.cross_entropy(there(2, 3), torch.tensor([0, 1])),
    "a generator": lambda: torch.rand(3, device=THERE, generator=torch.Generator()),
    "NumPy": lambda: there(2, 3).detach().numpy(),
    "NumPy, unseen": lambda: np.asarray(there(2, 3).detach()),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_what_is_left_on_the_cpu_is_an_error(mix: Callable[[], Any]) -> None:
    """As on CUDA."""
    with pytest.raises((RuntimeError, TypeError)):
        mix()


def test_a_tensor_that_is_left_behind_is_found() -> None:
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


ALLOWED: dict[str, Callable[[str], torch.Tensor]] = {
    "to it and back": lambda at: HERE.to(at),
    "into the CPU's": lambda at: torch.zeros(2, 3).copy_(HERE.to(at)),
    "into its own": lambda at: torch.zeros(2, 3, device=at).copy_(HERE),
    "a number": lambda at: HERE.to(at) * torch.tensor(2.0),
    "indices": lambda at: HERE.to(at)[torch.tensor([1, 0])],
    "a list of indices": lambda at: HERE.to(at)[[1]],
    "a view in place": lambda at: HERE.clone().to(at)[1].zero_(),
    "new data": lambda at: _with_new_data(HERE.to(at)),
    "random numbers": lambda at: torch.rand(3, device=at),
    "a new one like it": lambda at: HERE.to(at).new_full((2,), 3),
    "a range": lambda at: torch.arange(3, device=at),
}


def _with_new_data(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data.double() + 1
    return x


@pytest.mark.parametrize("make", ALLOWED.values(), ids=ALLOWED)
def test_what_cuda_allows_gives_the_numbers_of_the_cpu(
    make: Callable[[str], torch.Tensor],
) -> None:
    """Of the same type; what is made on the device stays there."""
    found, expected = (_seeded(make, at) for at in (THERE, "cpu"))
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu(), expected)
    assert found.tolist() == expected.tolist()


def _seeded(make: Callable[[str], torch.Tensor], at: str) -> torch.Tensor:
    torch.manual_seed(0)
    return make(at)


def test_integers_are_counted_as_on_cuda() -> None:
    """The CPU counts numbers with a point alone."""
    found = torch.histc(
        torch.tensor([0, 1, 1], dtype=torch.int32, device=THERE), 2, 0, 1
    )
    assert found.dtype == torch.int32
    assert found.tolist() == [1, 2]


def test_gradients_are_those_of_the_cpu() -> None:
    """Of a model, and on the device."""
    model: Any = tiny_model("qwen3_moe")
    ids = tiny_ids()
    model(ids, labels=ids).loss.backward()
    wanted = {name: own.grad.clone() for name, own in model.named_parameters()}
    model.zero_grad()
    model.to(THERE)
    model(ids.to(THERE), labels=ids.to(THERE)).loss.backward()
    for name, own in model.named_parameters():
        assert own.grad.device.type == "second", name
        torch.testing.assert_close(
            own.grad.cpu(), wanted[name], rtol=1e-12, atol=1e-15, msg=name
        )
