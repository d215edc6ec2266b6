"""Dropping whole experts with their rows of the router, in a context.

A token is then routed to the best of the kept experts, as many as before, and routing
weights are those that the family's router gives them: with a softmax over all experts,
a softmax over the kept ones, as if the logits of the others were −∞.

Source: NAEE (Lu et al. 2024, arXiv:2402.14800), REAP (Lasby et al. 2025,
arXiv:2510.13999).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.methods.expert_axes import ExpertAxis, find_expert_axes
from heapr_lab.models.experts import describe
from heapr_lab.models.identity import refuse_disturbed

KeptExperts = Mapping[int, Sequence[int]]
"""By layer, the numbers of the kept experts, ascending."""


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
    refuse_disturbed(model, remedy="drop experts of the dense model")
    axes = find_expert_axes(model)
    _check(model, axes, kept)
    with contextlib.ExitStack() as contexts:
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
