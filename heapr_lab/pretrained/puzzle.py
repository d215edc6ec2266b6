"""NemotronHPuzzle, for which transformers has no class, from its blocks of Nemotron-H.

Each block is built with numbers of its own. Experts go through transformers' experts
interface, and tensors in files have the published names.
"""

from typing import Any

from torch import nn
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHBlock,
    NemotronHForCausalLM,
    NemotronHModel,
    NemotronHPreTrainedModel,
    NemotronHRMSNorm,
)

from heapr_lab.pretrained.puzzle_config import MODEL_TYPE, NemotronHPuzzleConfig


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


def _register() -> None:
    """Have transformers find the model, and convert the tensors in its files."""
    if CONFIG_MAPPING[MODEL_TYPE] is not NemotronHPuzzleConfig:
        return  # it has its own
    AutoModel.register(NemotronHPuzzleConfig, NemotronHPuzzleModel)
    AutoModelForCausalLM.register(NemotronHPuzzleConfig, NemotronHPuzzleForCausalLM)
    # Nemotron-H's, but for the name of the trunk, which is published as `model`.
    every: list[Any] = get_checkpoint_conversion_mapping("nemotron_h")
    experts: list[Any] = [one for one in every if isinstance(one, WeightConverter)]
    register_checkpoint_conversion_mapping(MODEL_TYPE, experts)


_register()
