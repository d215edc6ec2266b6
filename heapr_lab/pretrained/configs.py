"""Configurations of the families for which transformers has no class.

They are apart from the models because they are registered as soon as transformers' list
of configurations is imported, when models cannot be imported yet; the models,
`heapr_lab.pretrained.architectures`, follow with the first configuration.
"""

import copy
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig

_MODELS = "heapr_lab.pretrained.architectures"


@strict
class DeepseekConfig(LlamaConfig):
    """The configuration in config.json of `model_type` deepseek.

    Dai et al., DeepSeekMoE, ACL 2024. Names and defaults are the published ones. What
    only training uses (`seq_aux`, `aux_loss_alpha`) is kept, and has no effect.
    """

    model_type = "deepseek"
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
                f"scoring_func is {self.scoring_func!r}: models of type 'deepseek' "
                "route by 'softmax'; is it a deepseek_v2 or deepseek_v3?"
            )
        super().__post_init__(**kwargs)
        importlib.import_module(_MODELS)

    def has_experts(self, layer: int) -> bool:
        """Whether a decoder layer has experts, rather than one dense MLP."""
        return (
            self.n_routed_experts is not None
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )


# --- NemotronHPuzzle ------------------------------------------------------------------

_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""What transformers calls kinds of blocks that it names otherwise."""
_WIDTH = "moe_intermediate_size"
_REQUIRED = (_WIDTH, "num_experts_per_tok", "n_routed_experts")
"""What a MoE block must have, or have from the whole model."""
_KNOWN = {
    "mamba": {"ssm_state_size"},
    "attention": set[str](),
    "mlp": {"intermediate_size"},
    "moe": {
        *_REQUIRED, "moe_shared_expert_intermediate_size", "moe_latent_size",
        "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
    },
}  # fmt: skip
"""What a block of each kind may have of its own."""


@strict
class NemotronHPuzzleConfig(NemotronHConfig):
    """The configuration in config.json of `model_type` nemotron_h_puzzle.

    It is a Nemotron-H whose blocks have numbers of their own, such as the width of
    their experts.
    """

    model_type = "nemotron_h_puzzle"

    n_routed_experts: Any = None
    moe_intermediate_size: Any = None
    num_experts_per_tok: Any = None
    block_configs: Any = None
    mtp_block_configs: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the kinds of blocks from their lists; forget code, which is never run.

        Raises:
            ValueError: a list of blocks is missing, or one of them is not known.
        """
        kwargs.pop("auto_map", None)
        self._take_kinds("block_configs", "layers_block_type")
        if self.num_nextn_predict_layers or self.mtp_block_configs:
            self._take_kinds("mtp_block_configs", "mtp_layers_block_type")
        super().__post_init__(**kwargs)
        importlib.import_module(_MODELS)

    def _take_kinds(self, blocks: str, kinds: str) -> None:
        """Set the list `kinds` to those of the list `blocks`.

        Raises:
            ValueError: there is none, it is not known, or `kinds` has others.
        """
        every, said = getattr(self, blocks), getattr(self, kinds)
        if not every:
            raise ValueError(f"{blocks} is missing: it lists what each block has")
        now = [self._kind_of(block, f"{blocks}[{n}]") for n, block in enumerate(every)]
        if said and [_KINDS.get(kind, kind) for kind in said] != now:
            raise ValueError(f"{kinds} and {blocks} name other kinds of blocks")
        setattr(self, kinds, now)

    def _kind_of(self, block: Mapping[str, Any], name: str) -> str:
        """The kind of a block, which is checked to have its numbers, and no others.

        Raises:
            ValueError: the kind is not known, or it has others.
        """
        kind = str(block.get("block_type"))
        if kind not in _KNOWN:
            expected = ", ".join(_KNOWN)
            raise ValueError(f"{name} is of type {kind!r}, expected one of {expected}")
        given = {key for key in block if block[key] is not None} - {"block_type"}
        if other := given - _KNOWN[kind]:
            raise ValueError(f"{name}, of type {kind}, has {min(other)}: not known")
        for key in _REQUIRED if kind == "moe" else ():
            if key not in given and getattr(self, key) is None:
                raise ValueError(f"{name}, of type {kind}, has no {key}")
        return _KINDS.get(kind, kind)

    def of_block(self, number: int) -> Any:
        """A copy with the numbers of one block."""
        config = copy.copy(self)
        for name, value in self.block_configs[number].items():
            if value is not None:
                setattr(config, name, value)
        return config

    def give_widths(self, widths: Mapping[int, int]) -> None:
        """Let the experts of each MoE block have these widths."""
        for number, width in widths.items():
            self.block_configs[number][_WIDTH] = width

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, with the published names of kinds."""
        plain: dict[str, Any] = super().to_dict()
        for name in _REQUIRED:
            if plain[name] is None:
                del plain[name]
        for kinds, blocks in (("layers", "block"), ("mtp_layers", "mtp_block")):
            every = plain[f"{blocks}_configs"] or ()
            plain[f"{kinds}_block_type"] = [block["block_type"] for block in every]
        return plain


for _config in (DeepseekConfig, NemotronHPuzzleConfig):
    if _config.model_type not in CONFIG_MAPPING:  # a later transformers may have it
        AutoConfig.register(_config.model_type, _config)
