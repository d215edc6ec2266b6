"""How transformers loads and saves models with composed or fewer experts.

Their checkpoints have a "quantization" named heapr_composed, which is the only hook of
transformers that may change modules before weights are loaded into them. `import
heapr_lab` registers it: this module is imported while transformers is, and by any of
`ragged_experts` and `composed_experts` before these are complete.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from heapr_lab.errors import SpecError
from heapr_lab.models import ragged_experts

if TYPE_CHECKING:
    from heapr_lab.methods.composed_experts import ComposedExperts, Plan

COMPOSED = "heapr_composed"
FORMAT_VERSION = 1


class ComposedConfig(QuantizationConfigMixin):
    """The entry `quantization_config` in config.json of a model of composed experts."""

    def __init__(
        self,
        experts: dict[str, Any] | None = None,
        n_kept: dict[str, int] | None = None,
        format_version: int = FORMAT_VERSION,
        **facts: Any,
    ) -> None:
        """The plans of experts modules, and numbers of kept experts, by path.

        `n_kept` has the experts modules whose layer has lost experts with their rows of
        the router.

        Raises:
            ValueError: the checkpoint is of NAEE's dynamic skipping.
        """
        if "skipping" in facts:
            raise ValueError(
                "the checkpoint has thresholds of dynamic skipping, which heapr_lab no "
                "longer runs: fit naee to the dense model again and save what it finds"
            )
        self.quant_method: Any = COMPOSED
        self.experts, self.n_kept = experts or {}, n_kept or {}
        self.format_version = format_version

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain data."""
        return {
            "quant_method": COMPOSED,
            "format_version": self.format_version,
            "experts": self.experts,
            "n_kept": self.n_kept,
        }


class ComposedQuantizer(HfQuantizer):
    """Replaces experts by composed ones before weights are loaded."""

    requires_calibration = True
    quantization_config: ComposedConfig

    def validate_environment(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuse a checkpoint of another version, as `check_version`."""
        ragged_experts.check_version(
            self.quantization_config.format_version, FORMAT_VERSION
        )

    def _process_model_before_weight_loading(self, model: Any, **_kwargs: Any) -> Any:
        """Narrow the layers that lost experts, and replace experts.

        Raises:
            ValueError: the plan does not match this model's experts.
        """
        from heapr_lab.methods.composed_experts import plan_from_dict

        config = self.quantization_config
        try:
            _narrow(model, config.n_kept)
            for path, plain in config.experts.items():
                put_experts(model, path, plan_from_dict(plain))
        except (SpecError, AttributeError) as error:
            raise ValueError(
                f"config.json does not fit this {type(model).__name__}: {error}"
            ) from error
        base: Any = type(model)
        model.__class__ = ragged_experts.without_holes(base)
        return model

    def _process_model_after_weight_loading(self, model: Any, **_kwargs: Any) -> Any:
        ragged_experts.unmark(model)
        return model

    def is_serializable(self) -> bool:
        """Whether the model can be saved: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: yes, nothing is quantised."""
        return True


def put_experts(model: nn.Module, path: str, plan: "Plan") -> "ComposedExperts":
    """Replace the experts module at `path` by one of `plan`, without values.

    Raises:
        SpecError: the plan does not fit the module.
    """
    from heapr_lab.methods import composed_experts as composed

    stock: Any = model.get_submodule(path)
    n_experts = stock.down_proj.shape[0]
    d_expert = stock.down_proj.shape[2 if stock.is_transposed else 1]
    composed.check_plan(plan, n_experts, d_expert, gated=stock.has_gate)
    experts = composed.ComposedExperts(stock, plan)
    parent, _, name = path.rpartition(".")
    block: Any = model.get_submodule(parent)
    setattr(block, name, experts)
    # Some families would initialise the parameters that were replaced.
    block._is_hf_initialized = True
    return experts


def _narrow(model: nn.Module, n_kept: Mapping[str, int]) -> None:
    """Give layers the number of experts that they have in the files."""
    if not n_kept:
        return
    # Imported when transformers is, which has no models yet.
    from heapr_lab.methods.expert_axes import find_expert_axes

    with torch.device("cpu"):  # for what is computed on the way
        axes = find_expert_axes(model, values=False)
    for axis in axes:
        if axis.layer.name in n_kept:
            axis.resize(n_kept[axis.layer.name])


def attach_composed(model: Any, n_kept: Mapping[str, int]) -> None:
    """Make transformers save the composed experts of `model` in the form it loads."""
    from heapr_lab.methods.composed_experts import composed_experts, plan_to_dict

    modules = composed_experts(model)
    plans = {k: plan_to_dict(m.plan) for k, m in modules.items()}
    quantizer = ComposedQuantizer(ComposedConfig(plans, dict(n_kept)))
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantizer.quantization_config
    base: Any = type(model)
    model.__class__ = ragged_experts.without_holes(base)
    ragged_experts.unmark(model)


if COMPOSED not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(COMPOSED)(ComposedConfig)
    register_quantizer(COMPOSED)(ComposedQuantizer)
