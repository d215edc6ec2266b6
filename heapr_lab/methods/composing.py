"""Experts in place of a model's own: in a context, in a copy, or in a checkpoint.

Merged experts, experts of low rank, a common base with differences, and constants are
all `Composition`s; with `kept`, experts are dropped with their rows of the router, too.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heapr_lab.checkpoints.folder import checksums_in, new_folder, save_tokenizer
from heapr_lab.checkpoints.provenance import MANIFEST_FILE
from heapr_lab.checkpoints.stored_type import (
    float32_in_files,
    in_dtype,
    stored_dtype,
)
from heapr_lab.errors import SpecError
from heapr_lab.methods.composed_experts import (
    ComposedExperts,
    Composition,
    distinct,
)
from heapr_lab.methods.expert_axes import (
    COUNTS,
    KeptExperts,
    check_in_memory,
    dropping,
)
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.folders import skeleton_of
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.models.modes import copied, exchanging
from heapr_lab.storage import files

Compositions = Mapping[int, Composition]
"""The experts that each layer gets in place of its own."""
_REMEDY = "drop or replace experts of the dense model"


def dense_experts(layer: ExpertsLayer) -> list[dict[str, torch.Tensor]]:
    """The layer's own experts, to replace some of their matrices."""
    return [layer.expert(expert) for expert in range(layer.n_experts)]


@contextlib.contextmanager
def composing(
    model: nn.Module, compositions: Compositions, kept: KeptExperts | None = None
) -> Iterator[nn.Module]:
    """Run `model` with other experts, and of each layer the experts `kept` only.

    The model changes in all threads, of which others may not run it. Its own modules
    are back when the context ends, also after an exception.

    Raises:
        SpecError: `compositions` or `kept` are for another model, the model is
            streamed, a mask or hook is active, or another thread is in such a context.
        LayoutError: experts cannot be replaced or dropped exactly.
    """
    refuse_disturbed(model, remedy=_REMEDY)
    with exchanging(model), contextlib.ExitStack() as contexts:
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
    check_in_memory(model)
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
    check_in_memory(model)
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
    _check(layer, composition)
    shapes, dense = (
        [{name: tensor.shape for name, tensor in expert.items()} for expert in experts]
        for experts in (composition, dense_experts(layer))
    )
    if shapes != dense or len(distinct(composition)) < sum(map(len, composition)):
        return ComposedExperts(layer.module, composition)
    module: nn.Module = copy.deepcopy(layer.module)
    twin = ExpertsLayer(layer.layer, layer.name, module)
    for mine, new in zip(dense_experts(twin), composition, strict=True):
        for name, tensor in mine.items():
            tensor.copy_(new[name])  # a view into the module
    return module


def _check(layer: ExpertsLayer, composition: Composition) -> None:
    """Check that it is for as many experts as the layer has, gated as they are.

    Raises:
        SpecError: it is not.
    """
    expected = {"down", "gate", "up"} if layer.gated else {"down", "up"}
    made = [{"down", *(n.partition("_")[0] for n in expert)} for expert in composition]
    others = [names for names in made if names not in ({"down"}, expected)]
    if others or len(made) != layer.n_experts:
        names = others[0] if others else expected
        raise SpecError(
            f"layer {layer.layer} has {len(made)} new experts with the projections "
            f"{', '.join(sorted(names))}; expected {layer.n_experts} experts with "
            f"{', '.join(sorted(expected))}"
        )


# --- checkpoints ------------------------------------------------------------------


def save_ordinary(
    small: Any,
    folder: Path | str,
    facts: Mapping[str, Any],
    *,
    tokenizer: Any = None,
    base: str | None = None,
) -> Path:
    """Write `small`, which was made of a dense model, with a manifest.

    Transformers and engines load it as any model of its family. Weights are in the type
    of the dense model's files, if these are on this machine.

    Args:
        small: a model with fewer experts, or other weights, after `renumber`.
        folder: a new folder.
        facts: plain data for the manifest, with the name of the `method`.
        tokenizer: the tokenizer to save; by default that of the dense model.
        base: name of the dense model; by default where it was loaded from.

    Returns:
        `folder`.

    Raises:
        SpecError: the family's configuration cannot express the experts, or `folder` is
            not empty or not writable.
        CacheError: the files changed while they were written.
    """
    if not _expresses(small.config, small):
        raise SpecError(
            f"{facts['method']} leaves experts that no configuration of "
            f"{type(small).__name__} can express. Expected dense experts, equally many "
            "in each layer: measure the model with apply, or materialise it"
        )
    base = base or small.config._name_or_path
    small = in_dtype(small, stored_dtype(small), float32_in_files(small))
    with new_folder(Path(folder)) as partial:
        small.save_pretrained(partial)
        manifest = {
            **facts,
            "base_model": Path(base).name if Path(base).is_dir() else base,
            "tokenizer": save_tokenizer(partial, tokenizer, base=base),
            "sha256": checksums_in(partial),
        }
        files.write_json(partial / MANIFEST_FILE, manifest)
    return Path(folder)


def renumber(small: Any, *, like: nn.Module) -> None:
    """Set the number of experts in the configuration and the modules of `small`.

    Nothing changes where the family's configuration cannot express it. It may have
    several names for the number, and the model one of its own, for router losses.

    Args:
        small: a copy of `like` with fewer experts, or other weights.
        like: the dense model.
    """
    layers = find_experts(like)
    modules: list[Any] = [small.get_submodule(layer.name) for layer in layers]
    before = {layer.n_experts for layer in layers}
    after = {len(m.down_proj) for m in modules if not isinstance(m, ComposedExperts)}
    if len(before) != 1 or len(after) != 1 or before == after:
        return
    config = copy.deepcopy(small.config)
    _set_counts(config, *before, *after)
    if _expresses(config, small):
        _set_counts(small.config, *before, *after)
        for module in small.modules():
            for name in COUNTS:
                if vars(module).get(name) in before:
                    setattr(module, name, *after)


def _set_counts(config: Any, before: int, after: int) -> None:
    plain = config.get_text_config()
    for name, value in plain.to_dict().items():
        if "experts" in name and type(value) is int and value == before:
            setattr(plain, name, after)


def _expresses(config: Any, model: nn.Module) -> bool:
    """Whether `config` is that of a model with the shapes of `model`."""
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in each.state_dict().items()}
        for each in (skeleton_of(config), model)
    ]
    return shapes[0] == shapes[1]
