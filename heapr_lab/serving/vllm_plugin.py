"""vLLM's plug-in: it makes vLLM load checkpoints whose experts differ in width.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).
The widths stand in config.json as the "quantization" named heapr, as for transformers,
and vLLM asks a quantization for the method of each layer. One that has the same width
for all of its experts gets vLLM's own method, and so its own kernels, with that width;
another one gets `RaggedMethod`. Models are vLLM's own, unchanged.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.ragged_experts import METHOD
from heapr_lab.serving.vllm_experts import ACTIVATIONS, NarrowMethod, RaggedMethod
from heapr_lab.serving.widths import Widths, layer_of, widths_by_layer

GPT_OSS = "GptOssForCausalLM"
"""The class of gpt-oss: vLLM's reads its own files alone; ours reads ours, too."""


class HeaprWidths(QuantizationConfig):
    """The widths of a checkpoint, and the method for each of its layers."""

    def __init__(self, widths: Widths) -> None:
        """The `widths` of the experts of each decoder layer."""
        super().__init__()
        self.widths = widths

    @classmethod
    def get_name(cls) -> Any:
        """The name in config.json."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """All types that vLLM has."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The least capability of a GPU, that of vLLM's own kernels."""
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file: everything stands in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "HeaprWidths":
        """The widths in `quantization_config` of config.json.

        Raises:
            SpecError: the format is of a later version, or has biases.
            LayoutError: the experts are not in numbered layers.
        """
        return cls(widths_by_layer(config))

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        """How `layer`, whose path is `prefix`, is allocated, loaded and run.

        Raises:
            LayoutError: the checkpoint has no such experts.
            SpecError: they cannot be run in this way.
        """
        if isinstance(layer, RoutedExperts):
            return self._of_experts(layer.moe_config, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def _of_experts(self, moe: FusedMoEConfig, prefix: str) -> QuantizeMethodBase:
        widths = self.widths.get(layer_of(prefix), [])
        if len(widths) != moe.num_logical_experts:
            raise LayoutError(
                f"config.json has {len(widths)} widths for {prefix}, expected "
                f"{moe.num_logical_experts}: use the config.json that the checkpoint "
                "was written with"
            )
        if moe.moe_parallel_config.use_ep:
            raise SpecError(
                "expert parallelism does not support experts of different widths: "
                "use tensor parallelism alone"
            )
        same = len(set(widths)) == 1 and widths[0] and widths[0] % moe.tp_size == 0
        if same and not moe.has_bias:
            return NarrowMethod(moe, widths[0], prefix)
        _check_ragged(moe)
        return RaggedMethod(moe, widths, prefix)


def _check_ragged(moe: FusedMoEConfig) -> None:
    """Check that experts of different widths can be run.

    Raises:
        SpecError: they have another activation, LoRA adapters are used, or
            CUDA graphs are.
    """
    unusual = {
        f"the activation {moe.activation.value}": moe.activation not in ACTIVATIONS,
        "clamped activations": moe.swiglu_limit is not None,
        "LoRA adapters": moe.is_lora_enabled,
    }
    names = [name for name, there in unusual.items() if there]
    if names:
        raise SpecError(
            f"experts of different widths with {names[0]} are not supported in vLLM: "
            "prune with --structure uniform, or use transformers"
        )
    eager = get_current_vllm_config().model_config.enforce_eager
    if not current_platform.is_cpu() and not eager:
        raise SpecError(
            "experts of different widths cannot be captured in CUDA graphs: give "
            "enforce_eager=True (--enforce-eager), or prune with --structure per_layer"
        )


def register() -> None:
    """Tell vLLM of our format; it may be called again."""
    register_quantization_config(METHOD)(HeaprWidths)
    ModelRegistry.register_model(GPT_OSS, f"heapr_lab.serving.vllm_gpt_oss:{GPT_OSS}")
