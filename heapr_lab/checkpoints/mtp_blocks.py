"""Layers that predict a further token (MTP) in forms that transformers does not know.

In Nemotron-3 one is a row of the trunk's blocks. Each block has a number of its own in
files; the first also has the projection, the last the norm at the end. In DeepSeek-V4 a
projection of the embedding is added to one of each stream of states.
"""

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

_OF_BLOCKS = {
    r"mtp\.layers\.\d+\.(enorm|hnorm|eh_proj)\.": r"layers.0.\1.",
    r"mtp\.layers\.\d+\.final_layernorm\.": "layers.0.post_norm.",
}
_OF_STREAMS = {
    r"mtp\.\d+\.(enorm|hnorm|e_proj|h_proj)\.": r"layers.0.\1.",
    r"mtp\.\d+\.norm\.": "layers.0.post_norm.",
    r"mtp\.\d+\.hc_head_": "layers.0.hc_head.hc_",
    r"mtp\.\d+\.(?=attn|ffn|hc_)": "layers.0.mtp_block.",
}


class MtpOfBlocks(MtpModel):
    """One such layer, of blocks of the kinds that the configuration names."""

    def __init__(self, main_model: Any, num_mtp_layers: int) -> None:
        """Take the trunk, whose configuration names the blocks and the first."""
        super().__init__(main_model, num_mtp_layers)
        block, kinds = type(main_model.get_decoder().layers[0]), self.config.layer_types
        blocks = [block(self.config, number) for number in range(len(kinds))]
        self.layers[0].mtp_block = _Blocks(blocks)

    def get_weight_conversions(self, main_model: Any) -> list[Any]:
        """What transformers makes of the tensors in files."""
        first = self.config.mtp_first_block
        blocks = {
            rf"mtp\.layers\.{first + n}\.(?=norm|mixer)": f"layers.0.mtp_block.{n}."
            for n in range(len(self.config.layer_types))
        }
        return _renamed(_OF_BLOCKS | blocks, main_model)


class MtpOfStreams(MtpModel):
    """The parts of one such layer; it cannot be run, and nothing prunes it."""

    def __init__(self, main_model: Any, num_mtp_layers: int) -> None:
        """Take the trunk."""
        config = main_model.config
        config.mtp_layer_types = ["sliding_attention"]
        config.mtp_mlp_layer_types = ["moe"]
        super().__init__(main_model, num_mtp_layers)
        (layer,), d_model = self.layers, config.hidden_size
        del layer.eh_proj
        layer.e_proj = nn.Linear(d_model, d_model, bias=False)
        layer.h_proj = nn.Linear(d_model, d_model, bias=False)
        layer.hc_head = type(main_model.get_decoder().hc_head)(self.config)

    def get_weight_conversions(self, main_model: Any) -> list[Any]:
        """What transformers makes of the tensors in files."""
        return _renamed(_OF_STREAMS, main_model)


def _renamed(names: dict[str, str], main_model: Any) -> list[Any]:
    """Conversions of these names, then those of the trunk."""
    renamings = [WeightRenaming(old, new) for old, new in names.items()]
    return [*renamings, *main_model._weight_conversions]


class _Blocks(nn.ModuleList):
    """One block after the other, as in the trunk."""

    def forward(
        self, states: torch.Tensor, attention_mask: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """The states (B, L, D) after the last block."""
        for block in self:
            mask = attention_mask if block.block_type == "full_attention" else None
            states = block(states, attention_mask=mask, **options)
        return states
