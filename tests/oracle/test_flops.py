"""The formulas for operations and parameters against torch's own counts."""

import pytest
import torch
from families import REPRESENTATIVES, tiny_ids, tiny_model
from keeps import random_keep
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import describe
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

IDS = tiny_ids(n_sequences=3, seq_len=9)
COUNTED = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3")


def counted_flops(model: nn.Module) -> int:
    """What torch counts in one forward, without the angles of the rotary embedding.

    Those do not depend on any weight; the formula leaves them out.
    """
    counter = FlopCounterMode(display=False)
    # torch's counter knows the fused attention of GPUs, but not that of the CPU.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(IDS, use_cache=False)
    angles = sum(
        sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
        if name.endswith("rotary_emb")
    )
    return counter.get_total_flops() - angles


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", COUNTED)
def test_flops_equal_torchs_counter(family: str, attention: str) -> None:
    """Operations per token, by the measured routing, are exactly those torch counts."""
    model = tiny_model(family, dtype=torch.float32, attn_implementation=attention)
    windows, seq_len = CalibrationSet.from_ids(IDS), IDS.shape[1]
    architecture, keep = describe(model), random_keep(model)
    tokens = collect_statistics(model, windows, batch_size=3).expert_tokens()
    dense = architecture.flops_per_token(None, tokens, seq_len=seq_len) * IDS.numel()
    assert dense == pytest.approx(counted_flops(model), rel=1e-12)
    # What was cut changes which experts later layers choose: count by that routing.
    with masking(model, keep):
        tokens = collect_statistics(model, windows, batch_size=3).expert_tokens()
    left = architecture.flops_per_token(keep, tokens, seq_len=seq_len) * IDS.numel()
    assert left == pytest.approx(counted_flops(prune(model, keep)), rel=1e-12)
    assert left < dense


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_parameters_equal_numel(family: str) -> None:
    """The whole, tied weights counted once, is what torch counts."""
    for tied in (False, True):
        model = tiny_model(family, tie_word_embeddings=tied)
        numel = sum(p.numel() for p in model.parameters())
        assert describe(model).parameters() == numel
