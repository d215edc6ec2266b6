"""Less-is-MoE's portable format in vLLM: vLLM's own models, read from flat tensors.

config.json names an architecture of the format, `Ragged` + vLLM's class; the plug-in
makes the classes below known under these names. They differ from vLLM's in two points:
experts have the widths of the entry `less_is_moe`, by the methods of `vllm_plugin`, and
flat tensors are cut into those of the family while they are read.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.models.deepseek_v2 import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
)
from vllm.model_executor.models.olmoe import OlmoeForCausalLM
from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from heapr_lab.models.less_is_moe import (
    ENTRY,
    FLAT_COLUMNS,
    FLAT_ROWS,
    Cut,
    path_of,
    sizes_of_entry,
)
from heapr_lab.serving.vllm_plugin import HeaprWidths


class FlatExperts:
    """Before a model class of vLLM: its experts are in flat tensors."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """As vLLM's, with the widths of the checkpoint.

        Raises:
            SpecError: the entry in config.json is of another version or layout.
        """
        config = vllm_config.model_config.hf_config
        self.sizes = sizes_of_entry(getattr(config, ENTRY, None))
        self.d_expert = config.hidden_size
        widths = {int(layer): own for layer, own in self.sizes.items()}
        vllm_config.quant_config = HeaprWidths(widths)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's, of the family's tensors.

        Raises:
            ValueError: a flat tensor has another size than config.json says.
        """
        natural = natural_tensors(weights, self.sizes, self.d_expert)
        loaded: set[str] = super().load_weights(natural)  # type: ignore[misc]
        return loaded


def natural_tensors(
    weights: Iterable[tuple[str, torch.Tensor]],
    sizes: Mapping[str, list[int]],
    d_expert: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint by the family's names; flat ones are cut.

    Args:
        weights: names and tensors, as in the files.
        sizes: the widths of each layer's experts, by its number.
        d_expert: width of the experts' input and output.

    Raises:
        ValueError: a flat tensor has another size than `sizes` says.
    """
    cuts = {
        f"{path_of(layer)}.{kind}": Cut(own, kind, d_expert=d_expert)
        for layer, own in sizes.items()
        for kind in (FLAT_ROWS, FLAT_COLUMNS)
    }
    for name, tensor in weights:
        if name in cuts:
            yield from _of_experts(name, tensor, cuts[name])
        else:
            yield name, tensor


def _of_experts(
    name: str, flat: torch.Tensor, cut: Cut
) -> Iterator[tuple[str, torch.Tensor]]:
    packed = cut.convert({name: flat}, [name], [name])[name]
    path = name.rpartition(".")[0]
    n_parts = 2 if cut.kind == FLAT_ROWS else 1
    each = packed.split([n_parts * width for width in cut.widths])
    for number, (own, width) in enumerate(zip(each, cut.widths, strict=True)):
        here = f"{path}.{number}"
        if cut.kind == FLAT_COLUMNS:
            yield f"{here}.down_proj.weight", own.T
        else:
            yield f"{here}.gate_proj.weight", own[:width]
            yield f"{here}.up_proj.weight", own[width:]


class RaggedQwen2MoeForCausalLM(FlatExperts, Qwen2MoeForCausalLM):
    """Qwen2-MoE."""


class RaggedQwen3MoeForCausalLM(FlatExperts, Qwen3MoeForCausalLM):
    """Qwen3-MoE."""


class RaggedOlmoeForCausalLM(FlatExperts, OlmoeForCausalLM):
    """OLMoE."""


class RaggedDeepseekV2ForCausalLM(FlatExperts, DeepseekV2ForCausalLM):
    """DeepSeek-V2."""


class RaggedDeepseekV3ForCausalLM(FlatExperts, DeepseekV3ForCausalLM):
    """DeepSeek-V3."""
