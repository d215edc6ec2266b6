"""Families that cannot be scored and pruned are refused by name, with the reason."""

import pytest
import torch
from families import tiny_ids, tiny_model
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from heapr_lab.errors import LayoutError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.models.families import REFUSED
from heapr_lab.models.folders import build, read_weights
from heapr_lab.text.calibration import CalibrationSet

DBRX = {
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 1,
    "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 8, "moe_num_experts": 2, "moe_top_k": 1},
}
LLAMA4 = {"intermediate_size_mlp": 8, "num_experts_per_tok": 1}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_before_anything_is_built(tmp_path, family):
    """From its configuration alone, which names the family."""
    assert family in CONFIG_MAPPING_NAMES
    config = AutoConfig.for_model(family)
    with pytest.raises(LayoutError, match=f"'{family}' is not.*{REFUSED[family][:30]}"):
        build(config)
    config.save_pretrained(tmp_path)
    with pytest.raises(LayoutError, match=f"'{family}' is not"):
        read_weights(tmp_path)


@pytest.mark.parametrize(("family", "sizes"), [("dbrx", DBRX), ("llama4_text", LLAMA4)])
def test_own_experts_are_refused(family, sizes):
    """A model that was loaded elsewhere is refused with the same sentence."""
    model = tiny_model(family, dtype=torch.float32, **sizes)
    assert model(tiny_ids()).logits.isfinite().all()
    with pytest.raises(LayoutError, match=f"'{family}'.*transformers' experts interf"):
        find_experts(model)
    with pytest.raises(LayoutError, match=f"'{family}'"):
        collect_statistics(model, CalibrationSet.from_ids(tiny_ids()))
