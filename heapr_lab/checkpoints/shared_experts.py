"""Zero atoms for shared experts whose width is counted in widths of a routed one.

In DeepSeek and its relatives shared experts are `n_shared_experts` times as wide as a
routed one. Where all routed experts are pruned to a width that does not divide this,
the shared ones get atoms whose weights are zero. These add exactly nothing to the
output, but they are stored and computed: fewer than one routed expert has.
"""

from collections.abc import Mapping

import torch

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by their names in the model."""

_AXES = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
"""The axis of the atoms in the matrices of a shared expert."""


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
