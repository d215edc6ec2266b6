"""Masking atoms while a context lasts, and slicing them out for good."""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

from heapr_lab.dispatch import masked
from heapr_lab.experts import ExpertsLayer, find_experts
from heapr_lab.ragged import RaggedExperts, check_keep
from heapr_lab.selection import KeepMask
from heapr_lab.specs import SpecError


@contextlib.contextmanager
def masking(model: nn.Module, keep: KeepMask) -> Iterator[nn.Module]:
    """Run `model` as if the atoms outside `keep` were gone; its weights stay untouched.

    Only forwards in the thread (or task) that entered the context are masked: a dense
    forward of the same model in another thread stays dense. Contexts nest: an atom
    stays where all of them keep it.

    Raises:
        SpecError: `keep` was made for another model.
        LayoutError: the model's experts cannot be masked exactly.

    Example:
        >>> with masking(model, keep):  # doctest: +SKIP
        ...     pruned = model(ids).logits
    """
    layers = find_experts(model)
    with masked(layers, _keeps(layers, keep)):
        yield model


def prune(model: nn.Module, keep: KeepMask, *, inplace: bool = False) -> nn.Module:
    """The model with the atoms outside `keep` sliced out, so that it is smaller.

    Gives the logits of `masking(model, keep)`. Without `inplace` the expert weights are
    copied once, in their sliced size, and `model` stays as it is.

    Raises:
        SpecError: `keep` was made for another model.
        LayoutError: the model's experts cannot be sliced exactly.
    """
    layers = find_experts(model)
    keeps = _keeps(layers, keep)
    if inplace:
        for layer, kept in zip(layers, keeps, strict=True):
            _replace(model, layer.name, RaggedExperts(layer, kept))
        return model
    # A deep copy in which each experts module is already "copied": to its sliced self.
    memo: dict[int, object] = {
        id(layer.module): RaggedExperts(layer, kept)
        for layer, kept in zip(layers, keeps, strict=True)
    }
    return copy.deepcopy(model, memo)


def _keeps(layers: list[ExpertsLayer], keep: KeepMask) -> list[torch.Tensor]:
    numbers = [layer.layer for layer in layers]
    if list(keep.layers) != numbers:
        raise SpecError(
            f"the mask is for the layers {list(keep.layers)}, the model's MoE layers "
            f"are {numbers}: the mask was made for another model"
        )
    keeps = [torch.from_numpy(keep.by_layer(number).copy()) for number in numbers]
    for layer, kept in zip(layers, keeps, strict=True):
        check_keep(layer, kept)
    return keeps


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
