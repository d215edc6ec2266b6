"""A second device, made of the CPU: whatever is left on the first one is an error.

What a machine without a GPU can show is that every tensor is on the device of the
model, forward and backward, and that the numbers are those of the CPU. A tensor of the
device has its values in a tensor of the CPU, on which each operation runs. As on CUDA,
tensors of two devices cannot be mixed, except in copies, as numbers and as indices,
there is no array of NumPy of one, and random numbers come from no generator of the CPU.
Its tensors say `is_cuda`, so the code for a GPU runs. It has no kernels, streams or
memory of its own, and says nothing of those of a GPU.

Importing it registers the device with torch, for the rest of the process.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
_MODULE = SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: 0,
    manual_seed_all=lambda _seed: None,  # random numbers are those of the CPU
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)
"""What torch asks of `torch.second`."""
_setup_privateuseone_for_python_backend(NAME, _MODULE)
_DEVICE = torch.device(NAME, 0)
_COPIES = ("aten::_to_copy", "aten::copy_")
_INDEXED = (
    "aten::index.Tensor",
    "aten::_unsafe_index.Tensor",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
)
"""Operations whose second argument, the indices, may be on the CPU."""


class SecondTensor(torch.Tensor):
    """A tensor on the device, whose values are in `inner`, on the CPU."""

    inner: torch.Tensor
    is_cuda = property(lambda _: True)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "SecondTensor":
        """A tensor of the shape, type and layout of `inner`."""
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_DEVICE,
        )
        tensor.inner = inner
        return tensor  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What an operation makes of tensors of the device."""
        return _run(op, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.inner = new.inner  # type: ignore[attr-defined]

    def tolist(self) -> Any:
        """The values; torch's own reads memory of the device."""
        return self.inner.tolist()

    def untyped_storage(self) -> Any:
        """The storage of the values, by which tensors that share memory are known."""
        return self.inner.untyped_storage()

    def __repr__(self, **_: Any) -> str:
        return f"{NAME}({self.inner})"


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation makes of the values: on the device, unless asked otherwise."""
    leaves = pytree.tree_leaves((args, kwargs))
    _refuse_mixed(op, args, leaves)
    device = kwargs.get("device")
    here = device is None or torch.device(device).type == NAME
    plain_args, plain = pytree.tree_map(_values, (args, kwargs))
    if here and device is not None:
        plain["device"] = torch.device("cpu")
    function = _histogram if op.name() == "aten::histc" else op
    known = {id(x.inner): x for x in leaves if isinstance(x, SecondTensor)}

    def placed(x: Any) -> Any:
        if not here or not isinstance(x, torch.Tensor):
            return x
        # An operation in place returns its argument.
        return known[id(x)] if id(x) in known else SecondTensor(x)

    values = function(*plain_args, **plain)
    into_cpu = op.name() == "aten::copy_" and not isinstance(args[0], SecondTensor)
    return args[0] if into_cpu else pytree.tree_map(placed, values)


def _refuse_mixed(op: Any, args: Any, leaves: list[Any]) -> None:
    """Refuse what is not on the device among tensors that are.

    Raises:
        RuntimeError: there is such a tensor, or a generator of the CPU.
    """
    if any(isinstance(x, torch.Generator) for x in leaves):
        raise RuntimeError(f"{op}: a generator of the CPU for a tensor of {_DEVICE}")
    if op.name() in _INDEXED:
        leaves = pytree.tree_leaves((args[0], args[2:]))
    others = [
        x
        for x in leaves
        if isinstance(x, torch.Tensor) and not isinstance(x, SecondTensor)
        if x.dim() or op.name() == "aten::stack"
    ]
    if others and op.name() not in _COPIES:
        raise RuntimeError(f"{op}: tensors of the CPU among those of {_DEVICE}")


def _values(x: Any) -> Any:
    return x.inner if isinstance(x, SecondTensor) else x


def _histogram(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """A histogram of integers, too, which CUDA counts and the CPU does not."""
    return torch.histc(x.double(), *args, **options).to(x.dtype)


# --- what has no tensor of the device among its arguments, or none that Python sees ---


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> SecondTensor:
    return SecondTensor(torch.empty(size, dtype=dtype))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, **_: Any
) -> SecondTensor:
    return SecondTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    _values(target).copy_(_values(source))
    return target


_OPERATIONS = torch.library.Library("aten", "IMPL")
_OPERATIONS.impl("empty.memory_format", _empty, "PrivateUse1")
_OPERATIONS.impl("empty_strided", _empty_strided, "PrivateUse1")
_OPERATIONS.impl("_copy_from", _copy_from, "PrivateUse1")
