"""Experts made of matrices that several may share, in place of a model's own.

Each projection of an expert e is W_e = A_e + L_e R_e: a dense matrix, and a product of
two factors, any of which may be absent, or be that of other experts, too. So one module
runs merged experts (A shared by a group), experts of low rank (L_e R_e alone), a common
base with differences of low rank (A shared by all), and constants (an output bias
alone). They are put in place in a context or in a copy, in which experts may be dropped
with their rows of the router, too.

Shapes: E n_experts, D d_expert, I atoms of an expert.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.methods.expert_axes import COUNTS, KeptExperts, check_in_memory, dropping
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.folders import skeleton_of
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.models.modes import assigned, copied, exchanging
from heapr_lab.models.ragged_experts import (
    activate,
    normalises,
    routed_sum,
    without_weights,
)

Matrices = Mapping[str, torch.Tensor]
"""What an expert is made of, without its activation, which stays the family's.

As `ExpertsLayer.expert` names them, `gate` (I, D) in families with a gate, `up` (I, D),
`down` (D, I), and the biases `gate_bias`, `up_bias` and `down_bias`; the factors of
each, such as `up_left` (out, rank) and `up_right` (rank, in). All may be absent."""
Composition = Sequence[Matrices]
"""The experts of one layer. What several of them have, as the same object, is one."""
Compositions = Mapping[int, Composition]
"""The experts that each layer gets in place of its own."""
_REMEDY = "drop or replace experts of the dense model"


def distinct(experts: Iterable[Matrices]) -> dict[int, tuple[str, torch.Tensor]]:
    """Each tensor of the experts once, by its `id`, with its name."""
    return {id(t): (name, t) for expert in experts for name, t in expert.items()}


def flops_of(expert: Matrices) -> int:
    """Operations of an expert for one token: 2 for each entry of its matrices."""
    return sum(2 * t.numel() for t in expert.values() if t.dim() == 2)


class ComposedExperts(nn.Module):
    """The experts of one layer, made of shared matrices.

    Replaces the family's own experts module, with the same arguments.
    """

    family: Any
    """The family's own module without weights: activation, gating and norm."""
    heapr_composed = True
    """The mark by which other code knows them."""

    @torch.no_grad()
    def __init__(self, module: Any, composition: Composition) -> None:
        """Copy the tensors of `composition` in place of the weights of `module`."""
        super().__init__()
        like = module.down_proj
        # Not a submodule, so that its own submodules keep their names.
        self.__dict__["family"] = without_weights(module)
        for name, child in self.family.named_children():
            self.add_module(name, child)
        names: dict[int, str] = {}
        for key, (name, tensor) in distinct(composition).items():
            names[key] = f"{name}_{len(names)}"
            stored = like.new_empty(tensor.shape).copy_(tensor)
            self.register_parameter(names[key], nn.Parameter(stored))
        self.experts = [
            {name: names[id(tensor)] for name, tensor in expert.items()}
            for expert in composition
        ]
        """The names of each expert's parameters."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The routed experts' weighted sum.

        Shapes: hidden_states (T, D); top_k_index, top_k_weights (T, K); result (T, D).
        """
        return routed_sum(
            self._expert, len(self.experts), hidden_states, top_k_index, top_k_weights
        )

    def _expert(self, expert: int, x: torch.Tensor) -> Any:
        parts = {
            k: self.get_parameter(name) for k, name in self.experts[expert].items()
        }
        rows = _projected(parts, "up", x)
        if rows is not None and self.family.has_gate:
            rows = _fused(self.family, _projected(parts, "gate", x), rows)
        h = x[:, :0] if rows is None else activate(self.family, rows)
        out = _projected(parts, "down", h)
        if out is None:
            out = torch.zeros_like(x)
        return self.family.post_expert_norm(out) if normalises(self.family) else out


def _projected(parts: Matrices, name: str, x: torch.Tensor) -> Any:
    """A projection of x (n, in), (n, out); None where there is nothing of it."""
    out = F.linear(x, parts[name]) if name in parts else None
    if f"{name}_left" in parts:
        low = F.linear(F.linear(x, parts[f"{name}_right"]), parts[f"{name}_left"])
        out = low if out is None else out + low
    bias = parts.get(f"{name}_bias")
    if bias is None:
        return out
    return bias.expand(len(x), -1) if out is None else out + bias


def _fused(family: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Both projections in the family's own order, (n, 2I)."""
    if family.is_concatenated:
        return torch.cat([gate, up], dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)


# --- in a context, or as a copy ---------------------------------------------------


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
        check_in_memory(model)
        layers = {layer.layer: layer for layer in find_experts(model)}
        unknown = sorted(set(compositions) - set(layers))
        if unknown:
            raise SpecError(
                f"there are experts for the layers {unknown}, the model's MoE layers "
                f"are {list(layers)}: they were made for another model"
            )
        new = []
        for number, composition in compositions.items():
            path, _, name = layers[number].name.rpartition(".")
            module = experts_of(layers[number], composition)
            new.append((model.get_submodule(path), name, module))
        contexts.enter_context(assigned(new))
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
        return ComposedExperts(layer.module, composition).train(layer.module.training)
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


# --- its configuration ------------------------------------------------------------


def renumber(small: Any, *, like: nn.Module) -> None:
    """Set the number of experts in the configuration and the modules of `small`.

    Where the family's configuration cannot express its experts, `save_pretrained` is
    made to refuse, because what it wrote could not be loaded. The configuration may
    have several names for the number, and the model one of its own, for router losses.

    Args:
        small: a copy of `like` with fewer experts, or other weights.
        like: the dense model.
    """
    layers = find_experts(like)
    modules: list[Any] = [small.get_submodule(layer.name) for layer in layers]
    if any(isinstance(module, ComposedExperts) for module in modules):
        small.save_pretrained = _refuse
        return
    before = [layer.n_experts for layer in layers]
    after = [len(module.down_proj) for module in modules]
    if before == after:
        return
    config = copy.deepcopy(small.config)
    _set_counts(config, before[0], after[0])
    if not _expresses(config, small):
        small.save_pretrained = _refuse
        return
    _set_counts(small.config, before[0], after[0])
    for module in small.modules():
        for name in COUNTS:
            if vars(module).get(name) == before[0]:
                setattr(module, name, after[0])


def _refuse(*_folder: Any, **_options: Any) -> NoReturn:
    """In place of the `save_pretrained` of what could not be loaded again.

    Raises:
        SpecError: always.
    """
    raise SpecError(
        "no configuration can express these experts: expected dense ones, equally many "
        "in each layer. Measure the model in memory, or fit another method"
    )


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
