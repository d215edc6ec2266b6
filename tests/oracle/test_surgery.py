"""Masked, sliced and zeroed models are one and the same, for every family.

Their operations and parameters, by the formulas, are those that torch counts.
"""

import copy

import pytest
import torch
from families import FAMILIES, REPRESENTATIVES, tiny_ids, tiny_model
from keeps import (
    full_keep,
    logits_of,
    masked_logits,
    random_keep,
    weights_of,
    widths_keep,
    zeroed_twin,
)
from oracles.streamed import ROUNDED
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from heapr_lab import CalibrationSet, collect_statistics, masking, prune
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.experts import describe, find_experts

EXACT = {"rtol": 1e-10, "atol": 1e-10}
"""float64: the same products, summed in another order."""
SINGLE = {"rtol": 1e-5, "atol": 1e-5}
"""float32 logits of order 1: some ten roundings of 6e-8."""

IDS = tiny_ids()


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_is_sliced_is_zeroed(family):
    """masking, prune and zero columns of W_down give the same logits, not the dense.

    A pruned model owns its weights, and leaves the model as it was.
    """
    model = tiny_model(family)
    keep = random_keep(model)
    assert set(keep.widths().iloc[0]) >= {0, 8}
    assert model.config.get_text_config()._experts_implementation == "eager"
    dense, before = logits_of(model, IDS), weights_of(model)
    masked = masked_logits(model, IDS, keep)
    zeroed = logits_of(zeroed_twin(model, keep), IDS)
    # The family's own code may add up in float32, whatever the model's type.
    close = SINGLE if family in ROUNDED else EXACT
    torch.testing.assert_close(masked, zeroed, **close)
    pruned = prune(model, keep)
    torch.testing.assert_close(masked, logits_of(pruned, IDS), **EXACT)
    shared = {t.data_ptr() for t in model.state_dict().values()}
    assert not shared & {t.data_ptr() for t in pruned.state_dict().values()}
    assert (masked - dense).abs().max() > 1e-3
    torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0)
    assert torch.equal(logits_of(model, IDS), dense)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_a_pruned_model_is_smaller_by_the_formula(family, tied):
    """Parameters by the formula, tied ones once, equal numel before and after."""
    model = tiny_model(family, tie_word_embeddings=tied)
    keep = random_keep(model)
    architecture = describe(model)
    pruned = prune(model, keep)
    numel = sum(p.numel() for p in model.parameters())
    left = sum(p.numel() for p in pruned.parameters())
    assert (architecture.parameters(), architecture.parameters(keep)) == (numel, left)
    assert left < numel
    # By hand: an atom's weights, and with biases one for each of its input rows.
    by_hand = 0
    for layer in find_experts(model):
        n_dropped = int((~keep.by_layer(layer.layer)).sum())
        rows = 2 if layer.gated else 1
        by_hand += n_dropped * ((rows + 1) * layer.d_expert + rows * layer.biased)
    assert numel - left == by_hand


@pytest.mark.parametrize("width", [0, 8])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_masks_that_are_empty_or_full(family, width):
    """Without atoms the output biases are left; with all of them, the dense model."""
    model = tiny_model(family)
    keep = widths_keep(model, width, structure="per_layer")
    expected = logits_of(zeroed_twin(model, keep), IDS)
    torch.testing.assert_close(masked_logits(model, IDS, keep), expected)
    torch.testing.assert_close(logits_of(prune(model, keep), IDS), expected)


def test_a_copy_of_a_masked_model_is_dense():
    """A model copied inside a mask is not masked, and can be masked itself.

    After its own mask it runs as the model did before the other one.
    """
    model = tiny_model("qwen2_moe", dtype=torch.float32)
    model.set_experts_implementation("batched_mm")
    keep = random_keep(model)
    dense = logits_of(model, IDS)
    with masking(model, keep):
        masked = logits_of(model, IDS)
        twin = copy.deepcopy(model)
        assert torch.equal(logits_of(twin, IDS), dense)
    assert torch.equal(logits_of(twin, IDS), dense)
    assert torch.equal(masked_logits(twin, IDS, keep), masked)
    for each in (model, twin):
        assert each.config._experts_implementation == "batched_mm"


# --- what is refused --------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    """The message gives layers and shapes; the model is left as it was."""
    model = tiny_model("qwen2_moe")
    other = full_keep(tiny_model("qwen2_moe", moe_intermediate_size=6))
    dense = logits_of(model, IDS)
    text = r"layer 0 has shape \(4, 6\), expected \(4, 8\).*another model"
    with pytest.raises(SpecError, match=text), masking(model, other):
        pass
    for inplace in (False, True):
        with pytest.raises(SpecError, match=text):
            prune(model, other, inplace=inplace)
    assert torch.equal(logits_of(model, IDS), dense)
    keep = full_keep(model)
    text = r"layers \[0, 1\], the model's MoE layers are \[1, 2\]"
    with pytest.raises(SpecError, match=text):
        prune(tiny_model("deepseek_v3"), keep)
    with pytest.raises(LayoutError, match="already pruned"):
        prune(prune(model, keep), keep)


# --- operations -------------------------------------------------------------------

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
def test_flops_equal_torchs_counter(family, attention):
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
