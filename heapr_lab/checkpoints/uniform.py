"""Stock models with narrower experts: pruned models whose experts have one width.

In DeepSeek and its relatives shared experts are `n_shared_experts` times as wide as a
routed one. Where all routed experts are pruned to a width that does not divide this,
the shared ones get atoms whose weights are zero. These add exactly nothing to the
output, but they are stored and computed: fewer than one routed expert has.

Shapes: E n_experts, D d_expert, w the width of all experts.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.folders import skeleton_of, unquantised
from heapr_lab.models.ragged_experts import RaggedExperts
from heapr_lab.pruning.masks import KeepMask

_WIDTHS = ("moe_intermediate_size", "intermediate_size")
"""Names of the width of an expert in configurations, the more specific first."""

_SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
"""Names of the number of shared experts."""

Layers = Mapping[int, int]
"""The width of the experts of each layer."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by their names in the model."""

_AXES = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
"""The axis of the atoms in the matrices of a shared expert."""


class Stock(NamedTuple):
    """A family's own configuration of a model whose experts have one width."""

    config: Any
    padded: dict[str, tuple[int, ...]]
    """Shapes of the tensors of shared experts that are wider, by their names."""
    n_zero: int
    """The atoms added to the shared experts of a layer; their weights are 0."""


def uniform_width(keep: KeepMask, dtype: torch.dtype | None = None) -> int:
    """The width of all experts of all layers.

    Raises:
        SpecError: the widths differ or are 0, or transformers' own grouped kernels do
            not support the width in `dtype`.
    """
    widths = sorted({int(w) for k in keep.layers for w in keep.by_layer(k).sum(1)})
    if len(widths) != 1 or widths == [0]:
        raise SpecError(
            f"the experts keep {widths[0]} to {widths[-1]} atoms, a uniform checkpoint "
            "needs one width above 0: select with structure='uniform'"
        )
    in_16_bytes = 16 // dtype.itemsize if dtype is not None else 1
    if widths[0] % in_16_bytes:
        raise SpecError(
            f"the experts keep {widths[0]} atoms, but in {dtype} the grouped kernels "
            f"of transformers need a multiple of {in_16_bytes}: select with multiple="
            f"{in_16_bytes}, or another multiple of it"
        )
    return widths[0]


def layer_widths(config: Any, keep: KeepMask, dtype: torch.dtype) -> Layers | None:
    """The widths in a mask of structure per_layer, if a configuration can have them.

    It can if the family's has one for each layer, and grouped kernels support them all
    in `dtype`.
    """
    one = {layer: int(keep.by_layer(layer).sum(1)[0]) for layer in keep.layers}
    fit = all(width and width * dtype.itemsize % 16 == 0 for width in one.values())
    return one if fit and hasattr(config, "give_widths") else None


def stock_config(config: Any, width: int) -> Stock:
    """The family's own configuration with experts of `width`, otherwise unchanged.

    Shared experts that are counted in this width may become wider, by zero atoms.

    Raises:
        SpecError: the family has no such configuration.
    """
    if hasattr(config, "give_widths"):
        raise SpecError(
            f"layers of a {config.model_type} have widths of their own, not one: "
            "choose the structure per_layer, aligned or ragged"
        )
    shapes = _other_shapes(skeleton_of(config))
    tried = []
    for candidate, change in _candidates(config, width):
        skeleton = skeleton_of(candidate)
        fits = {layer.d_inter for layer in find_experts(skeleton)} == {width}
        padded = wider(shapes, _other_shapes(skeleton))
        if fits and padded is not None:
            return Stock(candidate, padded, zero_atoms(shapes, padded))
        tried.append(change)
    raise SpecError(
        f"{type(config).__name__} cannot give routed experts the width {width} and "
        f"leave all else unchanged (tried {'; '.join(tried)}): shared experts or "
        "dense layers depend on the same number, and no width fits. Choose the "
        "structure per_layer, aligned or ragged"
    )


def _candidates(config: Any, width: int) -> Iterator[tuple[Any, str]]:
    plain = config.get_text_config()
    for name in _WIDTHS:
        old = getattr(plain, name, None)
        if old is None:
            continue
        new = copy.deepcopy(config)
        value = [width] * len(old) if isinstance(old, list) else width
        setattr(new.get_text_config(), name, value)
        yield new, f"{name}={width}"
        # The width of shared experts may be a multiple of a routed expert's.
        for counted in _SHARED:
            shared = getattr(plain, counted, None)
            if isinstance(old, int) and shared:
                n_shared = -(-old * shared // width)
                again = copy.deepcopy(new)
                setattr(again.get_text_config(), counted, n_shared)
                yield again, f"{name}={width}, {counted}={n_shared}"


def _other_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that are not of routed experts."""
    routed = {
        f"{layer.name}.{name}"
        for layer in find_experts(model)
        for name, _ in layer.module.named_parameters()
    }
    return {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in routed
    }


def stock_model(model: Any, width: int | Layers) -> Any:
    """A stock model that shares the weights of the pruned `model`.

    Its `heapr_zero_atoms` are those that shared experts were given.

    Raises:
        SpecError: the family has no such configuration.
    """
    config = unquantised(model.config)
    if isinstance(width, int):
        stock = stock_config(config, width)
    else:
        config.give_widths(width)
        stock = Stock(config, {}, 0)
    new: Any = skeleton_of(stock.config)
    new.heapr_zero_atoms = stock.n_zero
    experts = {}
    for layer in find_experts(new):
        ragged = model.get_submodule(layer.name)
        experts[layer.layer] = layer.name, functools.partial(_fused, layer, ragged)
    change = functools.partial(fit, padded=stock.padded)
    new = backend_of(model).given(new, model, experts, change)
    if hasattr(model, "generation_config"):
        new.generation_config = model.generation_config
    attached = getattr(model, "hf_quantizer", None) is not None
    if getattr(model, "_weight_conversions", None) and not attached:
        new._weight_conversions = model._weight_conversions
    return new


@torch.no_grad()
def _fused(layer: ExpertsLayer, ragged: RaggedExperts) -> dict[str, torch.Tensor]:
    """Parameters of the stock experts module, in its own orientation."""
    n_experts = len(ragged.heapr_widths)
    up = ragged.up_rows.unflatten(0, (n_experts, -1))  # (E, 2w, D)
    down = ragged.down_columns.unflatten(0, (n_experts, -1))  # (E, w, D)
    tensors = {
        layer.up_name: layer.oriented(up),
        "down_proj": layer.oriented(down.mT),
    }
    if ragged.up_bias is not None and ragged.down_bias is not None:
        tensors[f"{layer.up_name}_bias"] = ragged.up_bias.unflatten(0, (n_experts, -1))
        tensors["down_proj_bias"] = ragged.down_bias
    return {name: nn.Parameter(tensor.contiguous()) for name, tensor in tensors.items()}


# --- shared experts ---------------------------------------------------------------


def wider(before: Shapes, after: Shapes) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the tensors of shared experts that have more atoms in `after`.

    None if anything else differs.
    """
    if before.keys() != after.keys():
        return None
    shapes = {name: after[name] for name in after if after[name] != before[name]}
    fits = all(_only_wider(name, before[name], shapes[name]) for name in shapes)
    return shapes if fits else None


def _only_wider(name: str, old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    path, _, leaf = name.rpartition(".")
    module, _, kind = path.rpartition(".")
    axis = _AXES.get(f"{kind}.{leaf}")
    if axis is None or "shared_expert" not in module or len(old) != len(new):
        return False
    return new[axis] > old[axis] and new[1 - axis] == old[1 - axis]


def zero_atoms(before: Shapes, padded: Shapes) -> int:
    """How many atoms the shared experts of a layer were given."""
    added = (
        max(n - o for n, o in zip(shape, before[name], strict=True))
        for name, shape in padded.items()
    )
    return max(added, default=0)


def fit(name: str, tensor: torch.Tensor, padded: Shapes) -> torch.Tensor:
    """The tensor `name`, with zeros at the end of rows and columns up to its shape."""
    if name not in padded:
        return tensor
    wide = tensor.new_zeros(padded[name])
    wide[tuple(slice(size) for size in tensor.shape)] = tensor.detach()
    return wide
