"""Masking atoms within a context, and slicing them out permanently."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import differing
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.backend import NewModule, backend_of
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import Replacement, masked
from heapr_lab.models.identity import model_identity
from heapr_lab.models.modes import copied, unexchanged
from heapr_lab.models.ragged_experts import RaggedExperts
from heapr_lab.pruning.masks import KeepMask

ReplacedDownProj = Mapping[int, torch.Tensor]
"""W_down of every expert (E, D, I), by layer, in place of the model's own."""


@contextlib.contextmanager
def masking(
    model: nn.Module, keep: KeepMask | None, down_projs: ReplacedDownProj | None = None
) -> Iterator[nn.Module]:
    """Run `model` without the atoms outside `keep`; its weights are not changed.

    Only forward passes in the thread (or task) that entered the context are masked: the
    same model stays dense in other threads. Contexts nest: an atom is kept if all of
    them keep it.

    Args:
        model: the dense model.
        keep: the kept atoms; with None the model stays as it is.
        down_projs: replacement for W_down, as `compensation` makes it.

    Raises:
        SpecError: `keep` was made for another model, or another thread has replaced
            experts of this one.
        LayoutError: the model's experts cannot be masked exactly.

    Example:
        >>> with masking(model, keep):  # doctest: +SKIP
        ...     pruned = model(ids).logits
    """
    with unexchanged(model):
        if keep is None:
            yield model
            return
        layers = find_experts(model)
        downs = [_replacement(model, down_projs or {}, layer.layer) for layer in layers]
        with masked(layers, keeps_of(layers, keep), downs):
            yield model


def _replacement(
    model: nn.Module, down_projs: ReplacedDownProj, number: int
) -> Replacement | None:
    """W_down of a layer, or what reads it when the layer runs."""
    if number not in down_projs:
        return None
    return backend_of(model).when_needed(
        functools.partial(down_projs.__getitem__, number)
    )


def prune(
    model: nn.Module,
    keep: KeepMask,
    *,
    down_projs: ReplacedDownProj | None = None,
    inplace: bool = False,
) -> nn.Module:
    """The model with the atoms outside `keep` sliced out, so that it is smaller.

    It has the logits of `masking(model, keep, down_projs)`. Unless `inplace`, the
    expert weights are copied once, in their sliced size, and `model` is not changed; a
    pass with gradients in another thread is awaited. Of a streamed model a streamed one
    is made, which slices each layer when it is read, and `inplace` has no effect.

    Raises:
        SpecError: `keep` was made for another model, this thread is in such a pass, or
            another has replaced experts of the model.
        LayoutError: the model's experts cannot be sliced exactly.
    """
    with unexchanged(model):
        layers = find_experts(model)
        new = [
            NewModule(
                layer.layer,
                layer.name,
                layer.module,
                empty=functools.partial(RaggedExperts, widths=kept.sum(1).tolist()),
                made=functools.partial(sliced, layer, kept, down_projs or {}),
            )
            for layer, kept in zip(layers, keeps_of(layers, keep), strict=True)
        ]
        if inplace:
            pruned = backend_of(model).replaced(model, new)
        else:
            pruned = copied(model, {}, new)
            for name in ("to", "cuda"):  # accelerate's, bound to the dense model
                pruned.__dict__.pop(name, None)
    pruned.__dict__["heapr_keep"] = keep  # a record of how it was pruned
    if down_projs is not None:
        pruned.__dict__["heapr_weights"] = "W_down replaced, all else sliced"
    return pruned


@torch.no_grad()
def sliced(
    layer: ExpertsLayer, keep: torch.Tensor, down_projs: ReplacedDownProj
) -> RaggedExperts:
    """A copy of the experts of `layer` without the atoms outside `keep` (E, I).

    Its W_down (E, D, I) is that of `down_projs`, if the layer has one there.
    """
    experts = RaggedExperts(layer.module, keep.sum(1).tolist())
    atoms = [row.nonzero()[:, 0].to(layer.device) for row in keep]
    rows = [layer.atom_rows(kept) for kept in atoms]
    pairs = list(zip(range(layer.n_experts), rows, atoms, strict=True))
    up_rows = torch.cat([layer.up_rows[e][r] for e, r, _ in pairs])
    experts.up_rows = nn.Parameter(up_rows)  # may be of another type than W_down
    down = down_projs.get(layer.layer, layer.down).to(layer.device, layer.down.dtype)
    down_columns = torch.cat([down[e].T[a] for e, _, a in pairs])
    experts.down_columns = nn.Parameter(down_columns)
    up_bias: Any = layer.up_bias
    down_bias: Any = layer.down_bias
    if experts.up_bias is not None and experts.down_bias is not None:
        experts.up_bias.copy_(torch.cat([up_bias[e][r] for e, r, _ in pairs]))
        experts.down_bias.copy_(down_bias)
    return experts


def check_table(
    model: nn.Module,
    layers: list[ExpertsLayer],
    table: ImportanceTable,
    identity: Mapping[str, str | None] | None = None,
) -> None:
    """Check that `table` was measured on `model`, as far as it records this.

    Args:
        model: the model.
        layers: its MoE layers.
        table: the table.
        identity: that of the model, if it is known.

    Raises:
        SpecError: it was measured on another model.
    """
    _check_shapes(layers, table.shapes(), name="table")
    recorded = (table.metadata.get("spec") or {}).get("model")
    if recorded is None:
        return
    identity = identity or model_identity(model)
    if differ := differing(identity, recorded):
        raise SpecError(
            f"the table was measured on another model: it differs in "
            f"{differ}; collect the statistics of this model"
        )


def keeps_of(layers: list[ExpertsLayer], keep: KeepMask) -> list[torch.Tensor]:
    """The kept atoms of each of the model's MoE layers, bool (E, I).

    Raises:
        SpecError: `keep` was made for another model.
    """
    _check_shapes(layers, keep.shapes(), name="mask")
    return [torch.from_numpy(keep.by_layer(layer.layer).copy()) for layer in layers]


def _check_shapes(
    layers: list[ExpertsLayer], shapes: dict[int, tuple[int, int]], *, name: str
) -> None:
    """Check that a mask or a table has the layers of the model, in their shapes.

    Raises:
        SpecError: it was made for another model.
    """
    numbers = [layer.layer for layer in layers]
    if list(shapes) != numbers:
        raise SpecError(
            f"the {name} is for the layers {list(shapes)}, the model's MoE layers are "
            f"{numbers}: the {name} was made for another model"
        )
    for layer in layers:
        expected = (layer.n_experts, layer.d_inter)
        if shapes[layer.layer] != expected:
            raise SpecError(
                f"the {name} of layer {layer.layer} has shape {shapes[layer.layer]}, "
                f"expected {expected}: the {name} was made for another model"
            )
