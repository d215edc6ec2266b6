"""NVFP4 weights, dequantised when they are read: two of 4 bits in each byte.

16 columns of a row have a scale in FP8, and the matrix has one in float32. modelopt
multiplies by both; compressed-tensors divides by the second, and has other names.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers.auto import (
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from heapr_lab.models.dtypes import NVFP4, format_of
from heapr_lab.streaming.fp8 import check_grid, dequantised, with_exact_blocks

_OURS = "heapr_nvfp4"
"""The format under which transformers finds the classes below."""
BLOCK = 1, 16
"""Rows and columns that have a scale in common."""
_POSITIVE = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
"""Numbers of the lower three bits; the fourth is the sign."""
_RENAMED = {
    r"\.weight_packed": ".weight",
    r"\.weight_global_scale": ".weight_scale_2",
    r"\.input_global_scale": ".input_scale",
    r"\.[kv]_scale": ".input_scale",
}
"""Names in files that are others here; those of inputs' scales are not used."""


def with_our_classes(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of quantised weights, read by our classes if we have some."""
    if format_of(settings) != NVFP4:
        return with_exact_blocks(settings)
    divides = settings["quant_method"] == "compressed-tensors"
    return {"quant_method": _OURS, "divides": divides}


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The numbers in bytes, of which the lower bits are the first, in float32.

    Shapes: packed (rows, columns / 2), uint8; result (rows, columns).
    """
    numbers = torch.tensor(_POSITIVE, device=packed.device)
    numbers = torch.cat([numbers, -numbers])
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1)
    return numbers[pairs.flatten(-2).long()]


@register_quantization_config(_OURS)
class Nvfp4Config(QuantizationConfigMixin):
    """The settings, for weights that are always dequantised."""

    def __init__(self, *, divides: bool = False, **_others: Any) -> None:
        """Note whether weights are divided by the scale of the matrix."""
        self.quant_method: Any = _OURS
        self.divides, self.dequantize = divides, True


class Dequantize(ConversionOps):
    """Makes floats of weights that have scales; others stay as they are."""

    def __init__(self, hf_quantizer: "Nvfp4Quantizer") -> None:
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],  # noqa: ARG002
        target_patterns: list[str],  # noqa: ARG002
        full_layer_name: str = "",
        model: Any = None,
        **_kwargs: Any,
    ) -> dict[str, Any]:
        """The weights that transformers collected for one parameter, in its type.

        Raises:
            ValueError: they have not one scale for 16 columns, and one more.
        """
        dtype = model.get_parameter(full_layer_name).dtype
        floats = {}
        for name, stored in input_dict.items():
            if name.endswith("weight"):
                scales = [input_dict.get(f"{name}_scale{n}", []) for n in ("", "_2")]
                whole = stored if not any(scales) else self._in_floats(stored, *scales)
                floats[name] = [weight.to(dtype) for weight in whole]
        return {full_layer_name: floats["weight"][0]} if "weight" in floats else floats

    def _in_floats(self, *parts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The weights that numbers and scales of both kinds stand for.

        Raises:
            ValueError: as `convert`.
        """
        if len({len(part) for part in parts}) > 1:
            raise ValueError(
                f"{len(parts[0])} weights have {len(parts[1])} and {len(parts[2])} "
                "scales in NVFP4, expected two each: download the files again"
            )
        divides = self.hf_quantizer.quantization_config.divides
        for packed, scales, last in zip(*parts, strict=True):
            numbers = unpacked(packed)
            check_grid(numbers.shape, scales.shape, BLOCK)
            factor = 1 / last.float() if divides else last.float()
            yield dequantised(numbers, scales.float() * factor, BLOCK)


@register_quantizer(_OURS)
class Nvfp4Quantizer(HfQuantizer):
    """transformers' seam, with the class above."""

    quantization_config: Nvfp4Config
    serialized_names = {  # noqa: RUF012
        "weight": ["weight", "weight_scale", "weight_scale_2", "input_scale"]
    }

    def get_load_operations(self) -> dict[str, Any]:
        """What makes a weight of its parts."""
        return {"dequantize": Dequantize}

    def update_weight_conversions(self, conversions: Any, *args: Any) -> list[Any]:
        """The conversions, after which names are those of modelopt.

        Args:
            conversions: of the model's family.
            args: the model, in versions of transformers that give it.
        """
        renamed = [WeightRenaming(*pair) for pair in _RENAMED.items()]
        return [*renamed, *super().update_weight_conversions(conversions, *args)]

    def is_serializable(self) -> bool:
        """Whether the model can be saved: yes, in floats."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: yes."""
        return True
