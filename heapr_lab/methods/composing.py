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
    Plan,
    Projection,
    Shared,
)
from heapr_lab.methods.dropping import KeptExperts, dropping
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.models.modes import copied

Compositions = Mapping[int, Composition]
"""The experts that each layer gets in place of its own."""
_REMEDY = "drop or replace experts of the dense model"


def refuse_streamed(model: nn.Module) -> None:
    """Check, before any text is read, that experts can be replaced.

    Raises:
        SpecError: the model is streamed.
    """
    backend_of(model).require_loaded(
        remedy="load it with stream=False to replace experts"
    )


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


def composed(
    model: nn.Module, compositions: Compositions, kept: KeptExperts | None = None
) -> nn.Module:
    """A copy of `model` with other experts; `model` is not changed meanwhile.

    Nothing is made twice: of a twin that has the model's experts, only those of them
    that are left as they are have to be copied.

    Raises:
        SpecError: as `composing`.
        LayoutError: as `composing`.
    """
    refuse_streamed(model)
    refuse_disturbed(model, remedy=_REMEDY)
    experts = [layer.module for layer in find_experts(model)]
    dense = {id(tensor): tensor for module in experts for tensor in module.parameters()}
    with composing(copied(model, {**dense}), compositions, kept) as twin:
        tensors = (*twin.parameters(), *twin.buffers())
        return copied(twin, {id(t): t for t in tensors if id(t) not in dense})


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


def _made(
    model: nn.Module, compositions: Compositions
) -> list[tuple[ExpertsLayer, nn.Module]]:
    """The layers with other experts, and their modules.

    Raises:
        SpecError: a composition is for another model, or the model is streamed.
    """
    refuse_streamed(model)
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
        SpecError: it is for another number of experts, or has another gate.
    """
    plan = composition.plan
    _check(layer, plan)
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


def _check(layer: ExpertsLayer, plan: Plan) -> None:
    """Check that a plan is for as many experts as the layer has, gated as they are.

    Raises:
        SpecError: it is not.
    """
    expected = ["down", "gate", "up"] if layer.gated else ["down", "up"]
    numbers = {len(x.of) for parts in plan.values() for x in parts.values() if x.of}
    if sorted(plan) != expected or numbers != {layer.n_experts}:
        raise SpecError(
            f"layer {layer.layer} has new experts for {sorted(numbers)} with the "
            f"projections {', '.join(sorted(plan))}; expected {layer.n_experts} "
            f"experts with {', '.join(expected)}"
        )


def _is_stock(layer: ExpertsLayer, composition: Composition) -> bool:
    """Whether each expert has its own dense matrices, of the family's shapes."""
    return composition.plan == composition_of(layer).plan
