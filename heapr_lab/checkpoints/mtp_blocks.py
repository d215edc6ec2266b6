"""Layers that predict a further token (MTP) and are a row of the trunk's blocks.

They are in Nemotron-3, and transformers does not run them. Each block has a number of
its own in files; the first also has the projection, the last the norm at the end.
"""

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

_RENAMINGS = {
    r"mtp\.layers\.\d+\.(enorm|hnorm|eh_proj)\.": r"layers.0.\1.",
    r"mtp\.layers\.\d+\.final_layernorm\.": "layers.0.post_norm.",
    r"mtp\.layers\.(\d+)\.(?=norm|mixer)": r"layers.0.mtp_block.\1.",
}


class MtpOfBlocks(MtpModel):
    """One such layer, of blocks of the kinds that the configuration names."""

    def __init__(self, main_model: Any, num_mtp_layers: int) -> None:
        """Take the trunk, whose configuration has `mtp_layer_types`."""
        super().__init__(main_model, num_mtp_layers)
        block, kinds = type(main_model.get_decoder().layers[0]), self.config.layer_types
        blocks = [block(self.config, number) for number in range(len(kinds))]
        self.layers[0].mtp_block = _Blocks(blocks)

    def get_weight_conversions(self, main_model: Any) -> list[Any]:
        """What transformers makes of the tensors in files."""
        renamings = [WeightRenaming(old, new) for old, new in _RENAMINGS.items()]
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
