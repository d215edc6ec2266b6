"""Experts in place of a model's own, made of shared matrices: in a context, or a copy.

Merged experts, experts of low rank, a common base with differences, and constants are
all `Composition`s; with `kept`, experts are dropped with their rows of the router, too.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.methods.composed_experts import (
    ComposedExperts,
    Composition,
    Projection,
    Shared,
    check_plan,
)
from heapr_lab.methods.dropping import KeptExperts, drop_experts, dropping
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.models.modes import copied

Compositions = Mapping[int, Composition]
"""The experts that each layer gets in place of its own."""
_REMEDY = "replace the experts of the dense model"


def composition_of(layer: ExpertsLayer) -> Composition:
    """The layer's own experts as a composition: each has its own dense matrices."""
    return dense_composition([layer.expert(e) for e in range(layer.n_experts)])


def dense_composition(
    matrices: list[dict[str, torch.Tensor]], of: tuple[int, ...] = ()
) -> Composition:
    """Experts that are dense matrices.

    Args:
        matrices: what `ExpertsLayer.expert` returns for each different expert.
        of: for each expert the index among them; by default each has its own.
    """
    index = of or tuple(range(len(matrices)))

    def projection(name: str) -> Projection:
        def shared(key: str) -> Shared:
            there = key in matrices[0]
            return Shared(tuple(m[key] for m in matrices), index) if there else Shared()

        return Projection(dense=shared(name), bias=shared(f"{name}_bias"))

    gate = projection("gate") if "gate" in matrices[0] else None
    return Composition(projection("up"), projection("down"), gate)


@contextlib.contextmanager
def composing(
    model: nn.Module, compositions: Compositions, kept: KeptExperts | None = None
) -> Iterator[nn.Module]:
    """Run `model` with other experts, and of each layer the experts `kept` only.

    The model changes in all threads. Its own modules are back when the context ends,
    also after an exception.

    Raises:
        SpecError: `compositions` or `kept` are for another model, the model is
            streamed, or a mask or hook is active.
        LayoutError: experts cannot be replaced or dropped exactly.
    """
    refuse_disturbed(model, remedy=_REMEDY)
    with contextlib.ExitStack() as contexts:
        if kept is not None:
            contexts.enter_context(dropping(model, kept))
        for layer, module in _made(model, compositions):
            contexts.enter_context(_swapped(model, layer.name, module))
        yield model


@contextlib.contextmanager
def _swapped(model: nn.Module, path: str, module: nn.Module) -> Iterator[None]:
    parent, _, name = path.rpartition(".")
    children: Any = model.get_submodule(parent)._modules
    before = children[name]
    children[name] = module.train(before.training)
    try:
        yield
    finally:
        children[name] = before


def compose_experts(
    model: nn.Module, compositions: Compositions, kept: KeptExperts | None = None
) -> nn.Module:
    """A copy of `model` with other experts; `model` is not changed.

    Its `heapr_composed_layers` are those that have them. Where a layer's experts have
    the family's own shapes, they are in its own module. If this is so in every layer,
    `save_pretrained` writes an ordinary checkpoint.

    Raises:
        SpecError: as `composing`.
        LayoutError: as `composing`.
    """
    refuse_disturbed(model, remedy=_REMEDY)
    if kept is None:
        memo: dict[int, object] = {
            id(layer.module): module for layer, module in _made(model, compositions)
        }
        twin = copied(model, memo)
    else:
        twin = drop_experts(model, kept)
        for layer, module in _made(twin, compositions):
            parent, _, name = layer.name.rpartition(".")
            twin.get_submodule(parent)._modules[name] = module
    twin.__dict__["heapr_composed_layers"] = tuple(compositions)
    return twin


def _made(
    model: nn.Module, compositions: Compositions
) -> list[tuple[ExpertsLayer, nn.Module]]:
    """The layers with other experts, and their modules.

    Raises:
        SpecError: a composition is for another model, or the model is streamed.
    """
    backend_of(model).require_loaded(
        remedy="load it with stream=False to replace experts"
    )
    layers = {layer.layer: layer for layer in find_experts(model)}
    unknown = sorted(set(compositions) - set(layers))
    if unknown:
        raise SpecError(
            f"there are experts for the layers {unknown}, the model's MoE layers are "
            f"{list(layers)}: they were made for another model"
        )
    return [(layers[k], experts_of(layers[k], c)) for k, c in compositions.items()]


@torch.no_grad()
def experts_of(layer: ExpertsLayer, composition: Composition) -> nn.Module:
    """The experts module of `composition`, of the family's own class if it can be.

    Raises:
        SpecError: it does not fit the layer.
    """
    plan = composition.plan
    try:
        check_plan(plan, layer.n_experts, layer.d_expert, gated=layer.gated)
    except SpecError as error:
        raise SpecError(f"the experts of layer {layer.layer}: {error}") from error
    if not _is_stock(layer, composition):
        return ComposedExperts(layer.module, plan).fill(composition)
    module: nn.Module = copy.deepcopy(layer.module)
    twin = ExpertsLayer(layer.layer, layer.name, module)
    for expert in range(layer.n_experts):
        for name, tensor in twin.expert(expert).items():
            projection = composition.projections[name.removesuffix("_bias")]
            part = projection.bias if name.endswith("_bias") else projection.dense
            tensor.copy_(part.tensors[expert])  # a view into the module
    return module


def _is_stock(layer: ExpertsLayer, composition: Composition) -> bool:
    """Whether each expert has its own dense matrices, of the family's shapes."""
    return composition.plan == composition_of(layer).plan
