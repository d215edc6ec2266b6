"""The configuration of DeepSeekMoE, for which transformers has no class.

Dai et al., DeepSeekMoE, ACL 2024. It is a module of its own because it is registered as
soon as transformers' list of configurations is imported, when models cannot be imported
yet; the model, `heapr_lab.pretrained.deepseek`, follows with the first configuration.
"""

import importlib
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.llama.configuration_llama import LlamaConfig

MODEL_TYPE = "deepseek"


@strict
class DeepseekConfig(LlamaConfig):
    """The configuration in config.json of `model_type` deepseek.

    Names and defaults are the published ones. What only training uses (`seq_aux`,
    `aux_loss_alpha`) is kept, and has no effect.
    """

    model_type = MODEL_TYPE
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "n_routed_experts"}
    # Llama's has no experts.
    base_model_tp_plan: ClassVar[dict[str, Any]] = {}

    vocab_size: int = 102400
    moe_intermediate_size: int = 1407
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    scoring_func: str = "softmax"
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001

    def __post_init__(self, **kwargs: Any) -> None:
        """Forget the code that comes with published checkpoints: it is never run.

        Raises:
            ValueError: routing is by another function than softmax.
        """
        kwargs.pop("auto_map", None)
        if self.scoring_func != "softmax":
            raise ValueError(
                f"scoring_func is {self.scoring_func!r}: models of type {MODEL_TYPE!r} "
                "route by 'softmax'; is it a deepseek_v2 or deepseek_v3?"
            )
        super().__post_init__(**kwargs)
        importlib.import_module("heapr_lab.pretrained.deepseek")

    def has_experts(self, layer: int) -> bool:
        """Whether a decoder layer has experts, rather than one dense MLP."""
        return (
            self.n_routed_experts is not None
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )


if MODEL_TYPE not in CONFIG_MAPPING:  # a later transformers may have its own
    AutoConfig.register(MODEL_TYPE, DeepseekConfig)
