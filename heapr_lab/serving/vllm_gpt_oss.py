"""gpt-oss in vLLM: vLLM's own model, which reads our checkpoints as well as its own.

Experts are in tensors of their own there, with biases; vLLM's reader knows all experts
of a layer in one tensor, with gate and up projection by turns.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.models import gpt_oss

from heapr_lab.errors import SpecError
from heapr_lab.serving.vllm_experts import DOWN, GATE, SWIGLU_ALPHA, SWIGLU_LIMIT, UP
from heapr_lab.serving.vllm_plugin import HeaprWidths

_TENSOR = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_PARTS = {"gate": GATE, "up": UP, "down": DOWN}


class GptOssForCausalLM(gpt_oss.GptOssForCausalLM):
    """The model gpt-oss."""

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        """Build vLLM's model.

        Raises:
            SpecError: a pruned checkpoint's activation is not that of vLLM.
        """
        self.pruned = isinstance(vllm_config.quant_config, HeaprWidths)
        if self.pruned:
            _check_activation(vllm_config.model_config.hf_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load as vLLM does; each tensor of an expert of ours goes to its place.

        Raises:
            LayoutError: a tensor has another width than config.json says.
        """
        tensors = self._without_experts(weights) if self.pruned else weights
        loaded: set[str] = super().load_weights(tensors)
        return loaded

    def _without_experts(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            match = _TENSOR.fullmatch(name)
            if match is None:
                yield name, tensor
                continue
            path, number, projection, kind = match.groups()
            stem = "w2" if projection == "down" else "w13"
            place = f"{path}.routed_experts.{stem}_{kind}"
            if place in parameters:  # else it is on another rank, or missed at the end
                param: Any = parameters[place]
                param.weight_loader(
                    param, tensor, place, _PARTS[projection], int(number)
                )


def _check_activation(config: Any) -> None:
    pair = config.swiglu_limit, getattr(config, "swiglu_alpha", SWIGLU_ALPHA)
    if pair != (SWIGLU_LIMIT, SWIGLU_ALPHA):
        raise SpecError(
            f"config.json has swiglu_limit and swiglu_alpha {pair}, vLLM computes "
            f"{SWIGLU_LIMIT, SWIGLU_ALPHA}: use transformers for this model"
        )
