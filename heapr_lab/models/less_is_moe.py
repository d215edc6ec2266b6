"""Less-is-MoE's portable format: ragged experts as two flat tensors for each layer.

Version 1, layout `flat_gate_up_down_v1`, as the project describes it
(github.com/HectorHHZ/Less-is-MoE, docs/RAGGED_EXPERTS.md). config.json has
`architectures: ["Ragged" + the family's class]` and `less_is_moe`, with the width of
every expert of every decoder layer. `model.layers.L.mlp.experts.gate_up_proj` has
[W_gate; W_up] of each expert, (2 w_e, D) by rows, one expert after the other, and
`…down_proj` has W_down of each, (D, w_e) by rows. All other tensors are the family's.

The folder loads through `load_model`: what is read here becomes `RaggedExperts`.

Shapes: D d_expert, w_e atoms kept of expert e, W = sum of w_e.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from heapr_lab.errors import SpecError
from heapr_lab.models.ragged_experts import (
    HeaprConfig,
    HeaprQuantizer,
    Pack,
    QuantisedExperts,
    RaggedExperts,
    normalises,
)

FORMAT = "less-is-moe"
"""Its name on the command line, and as a "quantization" of transformers."""
ENTRY = "less_is_moe"
"""Its entry in config.json."""
VERSION = 1
LAYOUT = "flat_gate_up_down_v1"
PREFIX = "Ragged"
"""Of the class in `architectures`."""
FLAT_ROWS, FLAT_COLUMNS = "gate_up_proj", "down_proj"


class Cut(Pack):
    """Makes the packed matrix of `RaggedExperts` of a flat tensor."""

    def __init__(self, widths: list[int], kind: str, *, d_expert: int) -> None:
        super().__init__(widths, kind, interleaved=False)
        self.d_expert = d_expert

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **_kwargs: Any,
    ) -> dict[str, Any]:
        """Cut the one tensor that transformers collected into experts.

        Raises:
            ValueError: it is missing, not flat, or has another size.
        """
        (source,) = source_patterns
        flat = _only(input_dict.pop(source, []))
        parts = 2 if self.kind == FLAT_ROWS else 1
        wanted = (parts * sum(self.widths) * self.d_expert,)
        if flat is None or tuple(flat.shape) != wanted:
            found = "nothing" if flat is None else f"the shape {tuple(flat.shape)}"
            raise ValueError(
                f"{source}: found {found}, expected {wanted} of the widths in "
                f"config.json, {str(list(self.widths))[:60]}; a file of the checkpoint "
                "is missing, or belongs to another checkpoint"
            )
        return {target_patterns[0]: self._packed(flat)}

    def _packed(self, flat: torch.Tensor) -> torch.Tensor:
        if self.kind == FLAT_ROWS:
            return flat.view(-1, self.d_expert)
        sizes = [width * self.d_expert for width in self.widths]
        own = zip(flat.split(sizes), self.widths, strict=True)
        return torch.cat([part.view(self.d_expert, width).T for part, width in own])

    @property
    def reverse_op(self) -> "Cut":
        """The inverse: loading cuts, saving flattens."""
        other = Cut if isinstance(self, Flatten) else Flatten
        return other(self.widths, self.kind, d_expert=self.d_expert)


class Flatten(Cut):
    """Makes the flat tensor of a packed matrix."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **_kwargs: Any,
    ) -> dict[str, Any]:
        """Join the experts' matrices, each by rows."""
        packed = _only(input_dict.pop(source_patterns[0]))
        assert packed is not None
        if self.kind == FLAT_COLUMNS:
            each = packed.split(list(self.widths))
            packed = torch.cat([own.T.flatten() for own in each])
        return {target_patterns[0]: packed.flatten()}


def _only(found: Any) -> torch.Tensor | None:
    """The one tensor of what transformers collected; None if there is none."""
    tensors = found if isinstance(found, list) else [found]
    return tensors[0] if len(tensors) == 1 else None


class FlatConfig(HeaprConfig):
    """What `HeaprQuantizer` needs of the entry in config.json."""

    def __init__(
        self,
        sizes: Mapping[str, list[int]] | None = None,
        widths: dict[str, list[int]] | None = None,
        **_facts: Any,
    ) -> None:
        """The widths by the number of the layer, and by paths once these are known."""
        super().__init__(widths)
        self.quant_method: Any = FORMAT
        self.sizes = dict(sizes or {})

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"quant_method": FORMAT, "sizes": self.sizes, "widths": self.widths}


class FlatQuantizer(HeaprQuantizer):
    """Replaces experts by ragged ones, whose weights are in flat tensors."""

    quantization_config: FlatConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Replace the model's experts by ragged ones.

        Raises:
            ValueError: the widths do not match this model's experts, or the format
                cannot have them.
        """
        sizes = self.quantization_config.sizes
        widths = {path_of(layer): own for layer, own in sizes.items()}
        self.quantization_config.widths = widths
        return super()._process_model_before_weight_loading(model, **kwargs)

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        """The family's conversions, with flat tensors in place of experts."""
        model = self.loading if model is None else model
        kept = super().update_weight_conversions(weight_conversions, model)
        own = {f".{name}" for name in ("up_rows", "down_columns")}
        kept = [c for c in kept if not c.target_patterns[0].endswith(tuple(own))]
        for path in self.quantization_config.widths:
            kept += flat_conversions(path, model.get_submodule(path))
        return kept


if FORMAT not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(FORMAT)(FlatConfig)
    register_quantizer(FORMAT)(FlatQuantizer)


def flat_conversions(path: str, module: RaggedExperts) -> list[WeightConverter]:
    """How the two flat tensors become those of `module`, which is at `path`."""
    here = path[path.find("layers.") :]
    widths, d_expert = module.heapr_widths, module.d_expert
    return [
        WeightConverter([f"{here}.{kind}"], f"{here}.{target}", [op])
        for kind, target in ((FLAT_ROWS, "up_rows"), (FLAT_COLUMNS, "down_columns"))
        for op in [Cut(widths, kind, d_expert=d_expert)]
    ]


def path_of(layer: int | str) -> str:
    """The path of the experts module of a decoder layer, in models and in files."""
    return f"model.layers.{layer}.mlp.experts"


# --- config.json ------------------------------------------------------------------


def entry_of(widths: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The entry `less_is_moe` of a model whose experts have `widths`, by path."""
    return {
        "format_version": VERSION,
        "weight_layout": LAYOUT,
        "expert_intermediate_sizes": {
            str(layer): list(widths[path_of(layer)]) for layer in range(len(widths))
        },
    }


def read_entry(config: Any) -> None:
    """Make a configuration with the entry `less_is_moe` one of a ragged model.

    Raises:
        SpecError: it is of another version or layout, or has no widths.
    """
    sizes = sizes_of_entry(config.less_is_moe)
    del config.less_is_moe
    config.architectures = [
        name.removeprefix(PREFIX) for name in config.architectures or []
    ]
    config.quantization_config = FlatConfig(sizes).to_dict()


def sizes_of_entry(entry: Any) -> dict[str, list[int]]:
    """The widths of the experts, by the number of the layer, in an entry `less_is_moe`.

    Raises:
        SpecError: it is of another version or layout, or has no widths.
    """
    found = entry if isinstance(entry, dict) else {}
    said = found.get("format_version"), found.get("weight_layout")
    sizes = found.get("expert_intermediate_sizes")
    if said != (VERSION, LAYOUT) or not isinstance(sizes, dict):
        raise SpecError(
            f"config.json has the entry {ENTRY!r} with version {said[0]!r}, layout "
            f"{said[1]!r} and {'no ' if not isinstance(sizes, dict) else ''}widths; "
            f"expected version {VERSION}, layout {LAYOUT!r} and the widths of all "
            "experts: convert it with the version that wrote it"
        )
    return sizes


# --- what it cannot carry ---------------------------------------------------------


def check_carried(model: Any) -> None:
    """Check that the format has a place for everything in `model`.

    Args:
        model: dense or pruned; it may be on the meta device.

    Raises:
        SpecError: there is something that it has no place for.
    """
    experts = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "has_gate") or isinstance(module, RaggedExperts)
    }
    whys = itertools.chain(
        _why_not_model(model, list(experts)),
        *(_why_not_experts(module) for module in experts.values()),
    )
    why = next(whys, None)
    if why is not None:
        raise SpecError(
            f"the format {FORMAT} cannot carry this {type(model).__name__}: {why}. "
            "Leave --format out for a checkpoint of heapr_lab, which has them"
        )


def _why_not_model(model: Any, paths: list[str]) -> Any:
    config = model.config
    if config.get_text_config() is not config:
        yield "it is a wrapper around a language model"
    places = [path_of(layer) for layer in range(config.num_hidden_layers)]
    if paths != places:
        missing = [place for place in places if place not in paths]
        yield (
            f"every decoder layer needs routed experts, and there are none at "
            f"{missing[0]} (a dense layer, or a model that names them otherwise)"
            if missing
            else f"there are experts at {paths[-1]}"
        )
    for name in places[:1]:
        stored = _name_in_files(model, f"{name}.{FLAT_ROWS}")
        if stored != f"{name}.{FLAT_ROWS}":
            yield f"the files of its family say {stored} where the format says {name}"


def _why_not_experts(module: Any) -> Any:
    family = module.family if isinstance(module, RaggedExperts) else module
    if not family.has_gate:
        yield "its experts have no gate"
    elif not family.is_concatenated:
        yield "the gates of its experts are interleaved with their up projections"
    if family.has_bias:
        yield "its experts have biases"
    elif isinstance(module, RaggedExperts) and module.has_added_bias:
        yield "its experts were given output biases"
    if isinstance(module, QuantisedExperts):
        yield "the weights of its experts are integers"
    if normalises(family):
        yield "the outputs of its experts are normalised"


def _name_in_files(model: Any, name: str) -> str:
    """The name of a tensor once transformers has saved it."""
    for conversion in get_model_conversion_mapping(model, add_legacy=False)[::-1]:
        if isinstance(conversion, WeightRenaming):
            name, _ = conversion.reverse_transform().rename_source_key(name)
    return name
