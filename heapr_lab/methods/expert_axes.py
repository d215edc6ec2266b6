"""What an MoE block has for each routed expert, and dropping experts in a context.

It is tensors and numbers of the experts module and of the router beside it, found by
their sizes: a family of transformers gives them its own names. Dropping experts slices
all of them.

A token is then routed to the best of the kept experts, as many as before, and routing
weights are those that the family's router gives them: with a softmax over all experts,
a softmax over the kept ones, as if the logits of the others were −∞.

Source: NAEE (Lu et al. 2024, arXiv:2402.14800), REAP (Lasby et al. 2025,
arXiv:2510.13999).

Shapes: E n_experts, D d_model.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, describe, find_experts
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.models.modes import assigned, exchanging

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of attributes of modules that are the number of experts, if they equal it; of a
router that is a linear layer also `out_features`."""
_GROUPS = ("num_group", "n_group", "n_groups", "num_expert_group", "num_expert_groups")
_SHARED = "shared"
"""A word in the names of modules beside the routed experts that every token uses."""

KeptExperts = Mapping[int, Sequence[int]]
"""By layer, the numbers of the kept experts, ascending."""


@dataclass(frozen=True, eq=False)
class ExpertAxis:
    """What a layer has for each of its routed experts."""

    layer: ExpertsLayer
    tensors: tuple[tuple[nn.Module, str], ...]
    """Module and name of each parameter or buffer whose first axis is the experts."""
    counts: tuple[tuple[nn.Module, str], ...]
    """Module and name of each attribute that is the number of experts."""
    router: nn.Module
    """The module whose weight (E, D) gives the logits."""

    def of_router(self) -> "ExpertAxis":
        """The axis of the router alone; narrowed, it routes to fewer experts."""
        tensors, counts = (
            tuple(pair for pair in pairs if pair[0] is self.router)
            for pairs in (self.tensors, self.counts)
        )
        return ExpertAxis(self.layer, tensors, counts, self.router)

    def narrowed(self, kept: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """The layer with the experts `kept`, numbered in that order, in every thread.

        The model's own tensors and numbers are back when the context ends.
        """
        sliced = [(*at, _taken(getattr(*at), kept)) for at in self.tensors]
        return assigned([*sliced, *((*at, len(kept)) for at in self.counts)])


@torch.no_grad()
def _taken(tensor: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
    rows = tensor[torch.tensor(kept, device=tensor.device)].clone()
    if not isinstance(tensor, nn.Parameter):
        return rows
    return nn.Parameter(rows, requires_grad=tensor.requires_grad)


def find_expert_axes(model: nn.Module) -> list[ExpertAxis]:
    """What each MoE layer of `model` has for each of its routed experts, in order.

    Raises:
        LayoutError: there is no MoE layer, or experts cannot be dropped from one of
            them exactly (it is named): routing is limited to groups of experts, the
            router is not beside the experts, or weights are not in memory.
        SpecError: the model is streamed.
    """
    return [expert_axis(model, layer) for layer in find_experts(model)]


def check_in_memory(model: nn.Module) -> None:
    """Check that all weights of a model are in memory together.

    Raises:
        SpecError: it is streamed.
    """
    backend_of(model).require_loaded(
        remedy="load it with stream=False to drop or replace experts, or to take "
        "gradients of their weights"
    )


def expert_axis(model: nn.Module, layer: ExpertsLayer) -> ExpertAxis:
    """The same for one layer of `model`.

    Raises:
        LayoutError: experts cannot be dropped from it exactly.
        SpecError: the model is streamed.
    """
    check_in_memory(model)
    path, _, own_name = layer.name.rpartition(".")
    modules = {
        name: module
        for name, module in model.get_submodule(path).named_modules()
        if _SHARED not in name and not name.startswith(f"{own_name}.")
    }
    for name, module in modules.items():
        _refuse_groups(module, f"{path}.{name}")
    tensors = [
        (module, name)
        for place, module in modules.items()
        for name, tensor in _tensors_of(module)
        if _per_expert(tensor, layer.n_experts, name=f"{path}.{place}.{name}")
    ]
    routers = [
        module
        for module, name in tensors
        if module is not layer.module and getattr(module, name).dim() == 2
    ]
    names = {name for module, name in tensors if module is layer.module}
    others = sorted({name for name, _ in _tensors_of(layer.module)} - names)
    if len(routers) != 1 or others:
        raise LayoutError(
            f"{path} has {len(routers)} router weights with one row for each of its "
            f"{layer.n_experts} experts, expected 1, and {len(others)} tensors of the "
            f"experts without an axis of experts, expected 0 ({', '.join(others)}): "
            "experts of this family cannot be dropped"
        )
    counts = [
        (module, name)
        for module in modules.values()
        for name in (*COUNTS, "out_features")
        if vars(module).get(name) == layer.n_experts
    ]
    return ExpertAxis(layer, tuple(tensors), tuple(counts), routers[0])


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(recurse=False)
    return [*parameters, *module.named_buffers(recurse=False)]


def _per_expert(tensor: torch.Tensor, n_experts: int, *, name: str) -> bool:
    """Whether the first axis of `tensor` is the experts.

    Raises:
        LayoutError: another axis may be, it may hold numbers of experts, or the values
            are not in memory.
    """
    if tensor.is_meta:
        raise LayoutError(
            f"{name} is offloaded, its values are not in memory; load the model "
            "without offloading to drop experts"
        )
    if tensor.dim() > 1 and not tensor.is_floating_point():
        raise LayoutError(
            f"{name} is a table of {tensor.dtype}, shape {tuple(tensor.shape)}, which "
            "may say to which experts tokens go: experts of this family cannot be "
            "dropped, as it would have other numbers for them. Prune atoms instead"
        )
    first = tensor.dim() > 0 and tensor.shape[0] == n_experts
    if not first and n_experts in tensor.shape:
        raise LayoutError(
            f"{name} has the shape {tuple(tensor.shape)}, expected the {n_experts} "
            "experts on its first axis: experts of this family cannot be dropped"
        )
    return first


def _refuse_groups(module: nn.Module, name: str) -> None:
    """Check that tokens may be routed to any experts.

    Raises:
        LayoutError: they are routed to some groups of experts.
    """
    for attribute in _GROUPS:
        n_groups = vars(module).get(attribute)
        if isinstance(n_groups, int) and n_groups > 1:
            raise LayoutError(
                f"{name.rstrip('.')} ({type(module).__name__}) routes a token to some "
                f"of {n_groups} groups of experts ({attribute}={n_groups}), expected "
                "1: without some experts the groups would differ in size. Prune atoms "
                "instead"
            )


# --- dropping ---------------------------------------------------------------------


@contextlib.contextmanager
def dropping(model: nn.Module, kept: KeptExperts) -> Iterator[nn.Module]:
    """Run `model` without the experts outside `kept`.

    Unlike `masking`, the model changes in all threads, of which others may not run it.
    Its own tensors are back when the context ends, also after an exception.

    Raises:
        SpecError: `kept` is for another model, has too few experts, a mask or hook is
            active, or another thread is in such a context.
        LayoutError: experts cannot be dropped from the model exactly.
    """
    refuse_disturbed(model, remedy="drop experts of the dense model")
    axes = find_expert_axes(model)
    _check(model, axes, kept)
    with exchanging(model), contextlib.ExitStack() as contexts:
        for axis in axes:
            if len(kept[axis.layer.layer]) < axis.layer.n_experts:
                contexts.enter_context(axis.narrowed(kept[axis.layer.layer]))
        yield model


def _check(model: nn.Module, axes: list[ExpertAxis], kept: KeptExperts) -> None:
    """Check that `kept` has experts of each layer of the model, enough of them.

    Raises:
        SpecError: it has not.
    """
    layers = [axis.layer.layer for axis in axes]
    if sorted(kept) != layers:
        raise SpecError(
            f"the kept experts are of the layers {sorted(kept)}, the model's MoE "
            f"layers are {layers}: they were chosen for another model"
        )
    shapes = describe(model).layers
    for layer, experts in kept.items():
        n_experts, top_k = shapes[layer].n_experts, shapes[layer].top_k
        if list(experts) != sorted({*experts} & {*range(n_experts)}):
            raise SpecError(
                f"the kept experts of layer {layer} are {list(experts)}, expected "
                f"different numbers from 0 to {n_experts - 1}, ascending"
            )
        if len(experts) < top_k:
            raise SpecError(
                f"layer {layer} would keep {len(experts)} experts, but tokens are "
                f"routed to {top_k} of them: keep at least {top_k}"
            )
