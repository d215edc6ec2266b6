"""The layout of routed experts in transformers, which only this module knows.

Every MoE family of transformers v5 holds a layer's experts as fused 3-D parameters in
one module, decorated so that its forward goes through `ALL_EXPERTS_FUNCTIONS`. This
module finds those modules, presents their weights in one orientation, and refuses, by
name, experts that cannot be measured exactly.

A multimodal wrapper, such as a `*ForConditionalGeneration`, has a language model beside
a vision or audio tower. With token ids alone only the language model runs, so its
experts are measured and pruned, and all other weights stay as they are.

Shapes: E n_experts, I d_inter, D d_expert (width of the experts' input and output).
Letters: W_gate, W_up (E, I, D); W_down (E, D, I).
"""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import LayoutError
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.models.backend import backend_of
from heapr_lab.models.formats import refuse_by_name
from heapr_lab.models.modes import unexchanged
from heapr_lab.models.ragged_experts import RaggedExperts, activate, fused_experts

_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)(?=\.|$)")
_MEASURABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class ExpertsLayer:
    """The routed experts of one MoE layer, as transformers holds them."""

    layer: int
    """Number of the decoder layer."""
    name: str
    """Path of the module in its model."""
    module: Any
    """The module itself, with the attributes of transformers' experts interface."""

    @property
    def gated(self) -> bool:
        """Whether an expert has W_gate beside W_up."""
        return bool(self.module.has_gate)

    @property
    def biased(self) -> bool:
        """Whether the projections have biases."""
        return bool(self.module.has_bias)

    @property
    def down(self) -> torch.Tensor:
        """W_down of every expert, (E, D, I), a view."""
        return self.oriented(self._weight("down_proj"))

    @property
    def up_rows(self) -> torch.Tensor:
        """The input projection, (E, 2I, D) with a gate or (E, I, D) without; a view.

        Rows are in the family's own order; `atom_rows` gives those of an atom.
        """
        return self.oriented(self._weight(self.up_name))

    @property
    def projections(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The parameters of which `up_rows` and `down` are views."""
        return self._weight(self.up_name), self._weight("down_proj")

    def _weight(self, name: str) -> Any:
        return backend_of(self.module).weight(self.module, name)

    @property
    def up_name(self) -> str:
        """The name of the input projection in the module."""
        return "gate_up_proj" if self.gated else "up_proj"

    def oriented(self, projection: torch.Tensor) -> torch.Tensor:
        """A tensor like one of `projections` as `up_rows` and `down` have it; a view.

        Shapes: (E, out, in), whatever the module's own.
        """
        return projection.transpose(1, 2) if self.module.is_transposed else projection

    @property
    def up_bias(self) -> torch.Tensor | None:
        """The input projection's bias, (E, 2I) or (E, I), in the order of `up_rows`."""
        return self._weight(f"{self.up_name}_bias") if self.biased else None

    @property
    def down_bias(self) -> torch.Tensor | None:
        """The output bias of each expert, (E, D)."""
        return self._weight("down_proj_bias") if self.biased else None

    @property
    def n_experts(self) -> int:
        """Number of routed experts."""
        return int(self.module.down_proj.shape[0])

    @property
    def d_expert(self) -> int:
        """Width of the experts' input and output."""
        return int(self.module.down_proj.shape[2 if self.module.is_transposed else 1])

    @property
    def d_inter(self) -> int:
        """Number of atomic experts in each expert."""
        return int(self.module.down_proj.shape[1 if self.module.is_transposed else 2])

    @property
    def device(self) -> torch.device:
        """Device of the weights, once they are in memory."""
        return backend_of(self.module).device(self.module.down_proj)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return backend_of(self.module).dtype(self.module.down_proj)

    def atom_rows(self, atoms: torch.Tensor) -> torch.Tensor:
        """Indices of the rows of `up_rows` that belong to `atoms`, in its order.

        Shapes: atoms (n,) ascending; result (2n,) with a gate, else (n,).
        """
        if not self.gated:
            return atoms
        if self.module.is_concatenated:
            return torch.cat([atoms, atoms + self.d_inter])
        return torch.stack([2 * atoms, 2 * atoms + 1], dim=1).flatten()

    def expert(self, expert: int) -> dict[str, torch.Tensor]:
        """The matrices and biases of one expert, each apart; views.

        `gate` (I, D) with a gate, `up` (I, D), `down` (D, I), and with biases
        `gate_bias` (I,), `up_bias` (I,), `down_bias` (D,).
        """
        tensors = self.apart(self.up_rows[expert]) | {"down": self.down[expert]}
        if self.up_bias is not None and self.down_bias is not None:
            biases = self.apart(self.up_bias[expert]) | {"down": self.down_bias[expert]}
            tensors |= {f"{name}_bias": bias for name, bias in biases.items()}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def apart(self, rows: torch.Tensor, axis: int = 0) -> dict[str, torch.Tensor]:
        """Values of the rows of `up_rows`, those of W_gate and of W_up apart; views.

        Shapes: 2I numbers along `axis` with a gate, else I; in the result I, by `gate`,
        if there is one, and `up`.
        """
        names = ("gate", "up") if self.gated else ("up",)
        parts = self.by_atom(rows.movedim(axis, -1)).unbind(-1)
        return {k: part.movedim(-1, axis) for k, part in zip(names, parts, strict=True)}

    def by_atom(self, rows: torch.Tensor) -> torch.Tensor:
        """Values of the rows of `up_rows`, as gate and up of each atom.

        Shapes: rows (..., 2I) with a gate, else (..., I); result (..., I, 2) or
        (..., I, 1).
        """
        if not self.gated:
            return rows[..., None]
        pairs: torch.Tensor
        if self.module.is_concatenated:
            pairs = rows.unflatten(-1, (2, -1)).transpose(-1, -2)
        else:
            pairs = rows.unflatten(-1, (-1, 2))
        return pairs

    @torch.no_grad()
    def squared_norms(self) -> dict[str, torch.Tensor]:
        """`w_down_sq`, `w_up_sq` and, with a gate, `w_gate_sq`: each (E, I)."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        # vector_norm needs no copy as large as the weights. Over the rows of a matrix
        # it is ten times as slow on a CPU, so there one expert is squared at a time.
        rows = torch.linalg.vector_norm(self.up_rows, dim=-1, dtype=wide)
        if self.down.is_cuda:
            down = torch.linalg.vector_norm(self.down, dim=1, dtype=wide).square()
        else:
            down = torch.stack([w.to(wide).square().sum(0) for w in self.down])
        squares = self.by_atom(rows.square()).unbind(-1)  # each (E, I)
        names = ("w_gate_sq", "w_up_sq") if self.gated else ("w_up_sq",)
        of_rows = dict(zip(reversed(names), reversed(squares), strict=True))
        return {"w_down_sq": down} | of_rows


@torch.no_grad()  # views that autograd records, made in two threads, can deadlock it
def find_experts(model: nn.Module) -> list[ExpertsLayer]:
    """Every MoE layer of `model` that can be measured, masked and sliced exactly.

    The layers of a multimodal wrapper are in its language model.

    Raises:
        LayoutError: there is none, or one of them cannot be treated exactly (it is
            expert-parallel, quantised, outside transformers' experts interface, or its
            activation mixes atoms); the family is refused by name; there are experts
            outside the language model; or weights are offloaded.
        SpecError: another thread has replaced experts.
    """
    refuse_by_name(getattr(model, "config", None))
    with unexchanged(model):
        _refuse_offloaded(model)
        _refuse_unfused(model)
        modules = fused_experts(text_modules(model))
        _refuse_outside(model, modules)
    layers = [
        ExpertsLayer(_layer_number(name, index), name, module)
        for index, (name, module) in enumerate(modules.items())
    ]
    if not layers:
        raise LayoutError(
            f"found 0 MoE layers in {type(model).__name__}: expected experts modules "
            "of transformers' experts interface (fused 3-D weights), as in qwen2_moe, "
            "mixtral or deepseek_v3"
        )
    numbers = [layer.layer for layer in layers]
    if len(set(numbers)) != len(numbers):
        raise LayoutError(
            f"two experts modules share a layer number: {numbers}; this model is not "
            "supported, expected one experts module in each decoder layer"
        )
    for layer in layers:
        _refuse_inexact(layer)
    return sorted(layers, key=lambda layer: layer.layer)


def sliced_experts(model: nn.Module) -> dict[str, RaggedExperts]:
    """The experts of a pruned model by the names of their modules, in order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RaggedExperts)
    }


def is_wrapper(config: Any) -> bool:
    """Whether a model with this configuration has more than its language model."""
    return config is not None and config.get_text_config() is not config


def text_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that token ids pass through, but for a wrapper's head, and names."""
    if not is_wrapper(getattr(model, "config", None)):
        yield from model.named_modules()
        return
    inside = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is inside)
    yield from inside.named_modules(prefix=name)


def _refuse_outside(model: nn.Module, inside: Container[str]) -> None:
    """Check that all experts are in the language model.

    Raises:
        LayoutError: there are others, whose tensors have the same names in files.
    """
    for name in fused_experts(model.named_modules()):
        if name not in inside:
            raise LayoutError(
                f"{type(model).__name__} has experts outside its language model, in "
                f"{name}: expected them in the language model only, as text does not "
                "reach others"
            )


def _layer_number(name: str, index: int) -> int:
    numbers = _LAYER_NUMBER.findall(name)
    return int(numbers[-1]) if numbers else index


def _refuse_offloaded(model: nn.Module) -> None:
    """Check that no weights come to their device only while their module runs.

    Raises:
        LayoutError: some do, by hooks of accelerate's.
    """
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and hasattr(module, "_hf_hook"):
                raise LayoutError(
                    f"{name}.{key} is offloaded, so it cannot be measured or sliced: "
                    "load the model with stream=True, or on devices that hold it whole"
                )


def _refuse_unfused(model: nn.Module) -> None:
    for name, module in text_modules(model):
        if hasattr(module, "heapr_widths"):
            raise LayoutError(
                f"{name} is already pruned: its experts have the widths "
                f"{module.heapr_widths}; expected the unpruned model. Combine the "
                "masks instead and prune once"
            )
        if hasattr(module, "heapr_composed"):
            raise LayoutError(
                f"{name} is already compressed: its experts are composed of shared "
                "matrices or factors; expected the dense model"
            )
        holds_list = isinstance(module, nn.ModuleList) and name.endswith(".experts")
        looks_fused = (
            type(module).__name__.endswith("Experts")
            and not name.endswith(".shared_experts")
            and not hasattr(module, "is_concatenated")
            and any(p.dim() == 3 for p in module.parameters(recurse=False))
        )
        if holds_list or looks_fused:
            raise LayoutError(
                f"{name} ({type(module).__name__}) holds experts outside transformers' "
                "experts interface, so they cannot be measured; expected fused experts "
                "with gate_up_proj and down_proj"
            )


def _refuse_inexact(layer: ExpertsLayer) -> None:
    module = layer.module
    if getattr(module, "_is_expert_parallel", False):
        raise LayoutError(
            f"{layer.name} is expert-parallel: each rank sees only its own experts; "
            "load the model without expert parallelism"
        )
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dtype not in _MEASURABLE:
            raise LayoutError(
                f"{layer.name}.{name} is quantised ({parameter.dtype}); expected "
                "float16, bfloat16, float32 or float64: load it with stream=True, "
                "which dequantises FP8 and MXFP4"
            )
    for name in ("down_proj", layer.up_name):
        weight = getattr(module, name, None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 3:
            raise LayoutError(
                f"{layer.name} ({type(module).__name__}) has no fused 3-D {name!r}: "
                "quantised or unknown experts cannot be measured"
            )
    factor = 2 if layer.gated else 1
    up = getattr(module, layer.up_name)
    if layer.oriented(up).shape[1:] != (factor * layer.d_inter, layer.d_expert):
        raise LayoutError(
            f"{layer.name}: input projection {tuple(up.shape)} does not fit W_down "
            f"{tuple(module.down_proj.shape)}"
        )
    if not layer.d_inter:
        raise LayoutError(
            f"{layer.name} has experts of 0 atoms, expected at least 1: check the "
            "widths in config.json"
        )
    _refuse_mixing(layer)


def _refuse_mixing(layer: ExpertsLayer) -> None:
    """Check that the rows of one atom, given by `atom_rows`, change only its h.

    Raises:
        LayoutError: they change others too.
    """
    if not layer.gated:
        return
    atom = torch.tensor([layer.d_inter // 2])
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(1, 2 * layer.d_inter, generator=generator) + 0.5
    moved = rows.clone()
    moved[:, layer.atom_rows(atom)] += 0.25
    now = layer.module.down_proj.device
    device = now if now.type != "meta" else "cpu"
    before = activate(layer.module, rows.to(device))
    after = activate(layer.module, moved.to(device))
    changed = (before != after).nonzero()[:, 1].tolist()
    if changed != atom.tolist():
        raise LayoutError(
            f"{layer.name}: changing the weights of atom {atom.item()} changes the "
            f"activations {changed}; this gating cannot be split into atomic experts"
        )


def checked_norms(layer: ExpertsLayer) -> dict[str, torch.Tensor]:
    """Check that every weight of the layer's experts is finite; returns their norms.

    A NaN in an expert that no token is routed to would not show in any result.

    Raises:
        LayoutError: a weight is not finite (expert and atom are named).
    """
    squares = layer.squared_norms()
    for name, norms in squares.items():
        broken = (~torch.isfinite(norms)).nonzero().tolist()
        if broken:
            raise LayoutError(
                f"{layer.name}: {len(broken)} atoms have weights that are NaN or "
                f"infinite, first in {name.removesuffix('_sq')} of (expert, atom) "
                f"{tuple(broken[0])}; load the checkpoint again, or from its source"
            )
    return squares


def describe(model: Any) -> Architecture:
    """The sizes of `model` from which parameters, bytes and FLOPs are counted.

    Parameters and bytes are those of the whole model, FLOPs those of a multimodal
    wrapper's language model only, as for text.

    Raises:
        LayoutError: as `find_experts`.
    """
    layers = find_experts(model)
    routed = {id(p) for layer in layers for p in layer.module.parameters()}
    embeddings = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    head = model.get_output_embeddings()
    parameters = list(model.parameters())
    apart = routed | embeddings
    matrices = sum(
        p.numel() for p in _on_text(model) if p.dim() == 2 and id(p) not in apart
    )
    if head is not None and id(head.weight) in embeddings:
        matrices += head.weight.numel()  # tied: read as a matrix as well
    return Architecture(
        n_parameters=sum(p.numel() for p in parameters),
        bytes_per_parameter=parameters[0].element_size(),
        d_model=model.get_input_embeddings().weight.shape[1],
        layers={layer.layer: _layer_shape(model, layer) for layer in layers},
        other_weights_per_token=matrices,
        attention_width=_attention_width(model),
    )


def _on_text(model: Any) -> Iterator[nn.Parameter]:
    """The parameters that token ids pass through, each once."""
    if not is_wrapper(model.config):
        yield from model.parameters()
        return
    yield from model.get_decoder().parameters()
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        yield from head.parameters()


def _layer_shape(model: Any, layer: ExpertsLayer) -> LayerShape:
    n_up = 1 + layer.gated
    return LayerShape(
        n_experts=layer.n_experts,
        d_inter=layer.d_inter,
        d_expert=layer.d_expert,
        n_matrices=1 + n_up,
        atom_biases=n_up if layer.biased else 0,
        top_k=_experts_per_token(model, layer),
    )


def _experts_per_token(model: Any, layer: ExpertsLayer) -> int:
    """The number of routed experts of a token, as the configuration says.

    Raises:
        LayoutError: it does not.
    """
    around = model.get_submodule(layer.name.rpartition(".")[0])
    config = getattr(around, "config", model.config).get_text_config()
    for name in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, list) and len(set(value)) == 1:
            return int(value[0])
    raise LayoutError(
        f"{type(config).__name__} does not say how many experts a token is routed to; "
        "expected num_experts_per_tok or top_k_experts in config.json"
    )


def _attention_width(model: Any) -> int:
    """Sum over softmax-attention layers of n_heads · (qk width + v width)."""
    width, config = 0, model.config.get_text_config()
    for _, module in text_modules(model):
        if not type(module).__name__.endswith("Attention"):
            continue
        head_dim = getattr(module, "head_dim", None)
        key_dim = getattr(module, "qk_head_dim", head_dim)
        value_dim = getattr(module, "v_head_dim", head_dim)
        if key_dim is not None and value_dim is not None:
            n_heads = getattr(module, "num_heads", 0)  # can differ between layers
            n_heads = n_heads or getattr(config, "num_attention_heads", 0)
            width += n_heads * (key_dim + value_dim)
    return width
