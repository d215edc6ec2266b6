"""Families for which transformers has no class, from parts of other models of it.

Experts go through transformers' experts interface, so everything in this package works
as for any other family. Tensors in files have the published names.

DeepSeekMoE (Dai et al., ACL 2024): attention, norms and rotary embedding are Llama's,
MLPs and experts are those of Qwen2-MoE, which are the same functions. The router and
how layers are put together are here. In evaluation it is the published model; in
bfloat16 the router computes in float32, where the published code rounds. The auxiliary
losses of its training are left out.

NemotronHPuzzle: blocks of Nemotron-H, each built with numbers of its own.

Shapes: B windows, L tokens in each, T = B · L; D d_model, E n_routed_experts, K
num_experts_per_tok.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHBlock,
    NemotronHForCausalLM,
    NemotronHModel,
    NemotronHPreTrainedModel,
    NemotronHRMSNorm,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    Qwen2MoeExperts,
    Qwen2MoeMLP,
)

from heapr_lab.pretrained.configs import DeepseekConfig, NemotronHPuzzleConfig


class DeepseekTopKRouter(nn.Module):
    """Chooses K experts of each token by the softmax of its logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(
            torch.empty(config.n_routed_experts, config.hidden_size)
        )

    def forward(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The logits (T, E), then the weights and the numbers of the experts, (T, K).

        Shapes: hidden_states (T, D).
        """
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        logits = F.linear(hidden_states.to(wide), self.weight.to(wide))
        weights, experts = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights * self.routed_scaling_factor, experts


class DeepseekMoE(nn.Module):
    """Routed experts, and those that every token shares, as one wide MLP."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.gate = DeepseekTopKRouter(config)
        self.experts = Qwen2MoeExperts(config)
        width = config.moe_intermediate_size * (config.n_shared_experts or 0)
        self.shared_experts = Qwen2MoeMLP(config, width) if width else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum of both, (B, L, D), for hidden_states (B, L, D)."""
        rows = hidden_states.flatten(0, -2)
        _, weights, experts = self.gate(rows)
        out: torch.Tensor = self.experts(rows, experts, weights).view_as(hidden_states)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden_states)
        return out


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """A layer of Llama, whose MLP may be experts."""

    def __init__(self, config: DeepseekConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.has_experts(layer_idx):
            self.mlp: Any = DeepseekMoE(config)


class DeepseekPreTrainedModel(LlamaPreTrainedModel):
    """How models of this family are placed, initialised and run."""

    config: DeepseekConfig
    _no_split_modules = ["DeepseekDecoderLayer"]  # noqa: RUF012 (as in the base class)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the decorator in the source of this file

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekTopKRouter | Qwen2MoeExperts):
            for weight in module.parameters(recurse=False):
                initialization.normal_(weight, std=self.config.initializer_range)


class DeepseekModel(DeepseekPreTrainedModel, LlamaModel):
    """Embedding, decoder layers and last norm."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DeepseekDecoderLayer(config, n) for n in numbers)
        self.post_init()


class DeepseekForCausalLM(DeepseekPreTrainedModel, LlamaForCausalLM):
    """The language model of DeepSeekMoE."""

    def __init__(self, config: DeepseekConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# --- NemotronHPuzzle ------------------------------------------------------------------


class NemotronHPuzzleBlock(NemotronHBlock):
    """A block of Nemotron-H with the numbers that the configuration has for it."""

    def __init__(self, config: NemotronHPuzzleConfig, layer_idx: int) -> None:
        super().__init__(config.of_block(layer_idx), layer_idx)
        # In that of the model it is set how attention and experts are computed.
        mixer: Any = self.mixer
        getattr(mixer, "experts", mixer).config = config


class NemotronHPuzzlePreTrainedModel(NemotronHPreTrainedModel):
    """How models of this family are placed and run."""

    config: NemotronHPuzzleConfig
    _no_split_modules = ["NemotronHPuzzleBlock"]  # noqa: RUF012 (as in the base class)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the decorator in the source of this file


class NemotronHPuzzleModel(NemotronHPuzzlePreTrainedModel, NemotronHModel):
    """Embedding, blocks and last norm."""

    def __init__(self, config: NemotronHPuzzleConfig) -> None:
        super(NemotronHModel, self).__init__(config)  # its own would allocate blocks
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(NemotronHPuzzleBlock(config, n) for n in numbers)
        self.norm_f = NemotronHRMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.post_init()


class NemotronHPuzzleForCausalLM(NemotronHPuzzlePreTrainedModel, NemotronHForCausalLM):
    """The language model of NemotronHPuzzle."""

    def __init__(self, config: NemotronHPuzzleConfig) -> None:
        super(NemotronHForCausalLM, self).__init__(config)
        self.model = NemotronHPuzzleModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# --- registration -----------------------------------------------------------------


def _register(config: Any, model: Any, language_model: Any, files: list[Any]) -> None:
    """Have transformers find the models, and convert the tensors in their `files`."""
    if CONFIG_MAPPING[config.model_type] is not config:
        return  # it has its own
    AutoModel.register(config, model)
    AutoModelForCausalLM.register(config, language_model)
    register_checkpoint_conversion_mapping(config.model_type, files)


# Tensors of each expert, as in the files of Qwen2-MoE and DeepSeek-V2.
_EXPERTS: Any = get_checkpoint_conversion_mapping("qwen2_moe")
_register(DeepseekConfig, DeepseekModel, DeepseekForCausalLM, _EXPERTS)
# Nemotron-H's, but for the name of the trunk, which is published as `model`.
_BLOCKS: Any = get_checkpoint_conversion_mapping("nemotron_h")
_register(
    NemotronHPuzzleConfig,
    NemotronHPuzzleModel,
    NemotronHPuzzleForCausalLM,
    [conversion for conversion in _BLOCKS if isinstance(conversion, WeightConverter)],
)
