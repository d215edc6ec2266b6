"""Dropping whole experts with their rows of the router, in a context or permanently.

A token is then routed to the best of the kept experts, as many as before, and routing
weights are those that the family's router gives them: with a softmax over all experts,
a softmax over the kept ones, as if the logits of the others were −∞.

Source: NAEE (Lu et al. 2024, arXiv:2402.14800), REAP (Lasby et al. 2025,
arXiv:2510.13999).
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.methods.expert_axes import COUNTS, ExpertAxis, find_expert_axes
from heapr_lab.models.experts import describe
from heapr_lab.models.folders import build
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.models.modes import copied

KeptExperts = Mapping[int, Sequence[int]]
"""By layer, the numbers of the kept experts, ascending."""

_REMEDY = "drop experts of the dense model"


@contextlib.contextmanager
def dropping(model: nn.Module, kept: KeptExperts) -> Iterator[nn.Module]:
    """Run `model` without the experts outside `kept`.

    Unlike `masking`, the model changes in all threads. Its own tensors are back when
    the context ends, also after an exception.

    Raises:
        SpecError: `kept` is for another model, has too few experts, or a mask or hook
            is active.
        LayoutError: experts cannot be dropped from the model exactly.
    """
    refuse_disturbed(model, remedy=_REMEDY)
    axes = find_expert_axes(model)
    _check(model, axes, kept)
    with contextlib.ExitStack() as contexts:
        for axis in axes:
            if len(kept[axis.layer.layer]) < axis.layer.n_experts:
                contexts.enter_context(axis.narrowed(kept[axis.layer.layer]))
        yield model


def drop_experts(model: nn.Module, kept: KeptExperts) -> nn.Module:
    """A copy of `model` without the experts outside `kept`; `model` is not changed.

    If all layers keep equally many, and the family's configuration can express it, the
    copy has this configuration, so that `save_pretrained` writes an ordinary
    checkpoint, and `heapr_experts_in_config` of the copy is True. Its `heapr_experts`
    is `kept`, and `heapr_n_experts` their number by the path of the experts module.

    Raises:
        SpecError: as `dropping`.
        LayoutError: as `dropping`.
    """
    refuse_disturbed(model, remedy=_REMEDY)
    axes = find_expert_axes(model)
    _check(model, axes, kept)
    memo: dict[int, object] = {}
    for axis in axes:
        sliced = axis.sliced(kept[axis.layer.layer])
        for (module, name), tensor in zip(axis.tensors, sliced, strict=True):
            memo[id(getattr(module, name))] = tensor
    # A deep copy in which each tensor of the experts is already "copied": sliced.
    twin = copied(model, memo)
    names = {id(module): name for name, module in model.named_modules()}
    for axis in axes:
        for module, name in axis.counts:
            target = twin.get_submodule(names[id(module)])
            setattr(target, name, len(kept[axis.layer.layer]))
    numbers = {len(experts) for experts in kept.values()}
    twin.__dict__["heapr_experts_in_config"] = _set_config(twin, axes, numbers)
    twin.__dict__["heapr_experts"] = {k: tuple(experts) for k, experts in kept.items()}
    twin.__dict__["heapr_n_experts"] = {
        axis.layer.name: len(kept[axis.layer.layer]) for axis in axes
    }
    return twin


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


# --- the configuration ------------------------------------------------------------


def _set_config(twin: Any, axes: list[ExpertAxis], n_kept: set[int]) -> bool:
    """Give `twin` the configuration of its own sizes, if its family has one."""
    n_experts = {axis.layer.n_experts for axis in axes}
    if len(n_kept) != 1 or len(n_experts) != 1:
        return False
    (kept,), (before,) = n_kept, n_experts
    names = _counts_in_config(twin, before, kept)
    if names is None:
        return False
    _set_counts(twin.config, names, kept)
    for module in twin.modules():  # such as the model's own, for the auxiliary loss
        for attribute in COUNTS:
            if vars(module).get(attribute) == before:
                setattr(module, attribute, kept)
    return True


def _counts_in_config(model: Any, before: int, kept: int) -> set[str] | None:
    """The names in the configuration that make it one of `model` with `kept` experts.

    The model already has them, its configuration has `before`. A family may have other
    names for the number, each of which may be read when it is loaded: they change with
    it. None if there is no such name.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plain = model.config.get_text_config()
    names = {name for name in COUNTS if getattr(plain, name, None) == before}
    for name, value in plain.to_dict().items():
        if value != before or isinstance(value, bool) or "experts" not in name:
            continue
        config = copy.deepcopy(model.config)
        _set_counts(config, {name} | names, kept)
        with torch.device("meta"):
            skeleton = build(config)
        tensors = skeleton.state_dict().items()
        if {key: tuple(tensor.shape) for key, tensor in tensors} == shapes:
            return {name} | names
    return None


def _set_counts(config: Any, names: set[str], number: int) -> None:
    for name in names:
        setattr(config.get_text_config(), name, number)
