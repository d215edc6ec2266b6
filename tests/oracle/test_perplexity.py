"""Perplexity and divergence against transformers' own loss and sums by hand."""

import pytest
import torch
from families import REPRESENTATIVES, tiny_ids, tiny_model
from keeps import full_keep, logits_of, masked_logits, random_keep

from heapr_lab import evaluate_divergence
from heapr_lab.models import likelihood
from heapr_lab.models.likelihood import token_nll

AFTER_THE_HEAD = {
    "granitemoe": {"logits_scaling": 3.0},
    "gemma2": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
}
"""Families that change their logits after the head, the change made large."""


@pytest.mark.parametrize("family", [*REPRESENTATIVES, *AFTER_THE_HEAD])
def test_nll_is_the_family_s_own_loss(family, monkeypatch):
    """The mean of token_nll is the loss that transformers computes of whole logits."""
    model, ids = tiny_model(family, **AFTER_THE_HEAD.get(family, {})), tiny_ids()
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        targets = ids[:, 1:].flatten()
        whole = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets, reduction="none"
        )
        monkeypatch.setattr(likelihood, "_chunk_tokens", lambda _model: 7)
        nll = token_nll(model, ids)
        loss = model(ids, labels=ids, use_cache=False).loss
    # Sums of a few dozen terms in float64, to which not all cast their logits.
    rounding = 1e-5 if family == "nemotron_h" else 1e-12
    torch.testing.assert_close(nll.flatten(), whole, rtol=rounding, atol=rounding)
    # transformers' loss function itself works in float32.
    assert nll.mean().item() == pytest.approx(loss.item(), rel=1e-5)
    assert nll.std() > 0.05


@pytest.mark.parametrize("batch_size", [None, 2])
def test_divergence_from_whole_logits(batch_size):
    """KL and agreement are those of whole logits; keeping everything changes none."""
    model, ids = tiny_model("qwen2_moe"), tiny_ids()
    keep = random_keep(model)
    result = evaluate_divergence(model, keep, ids, batch_size=batch_size)
    log_p = logits_of(model, ids)[:, :-1].log_softmax(-1)
    log_q = masked_logits(model, ids, keep)[:, :-1].log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item()
    assert kl > 0.01
    assert agreement < 1
    assert result.kl == pytest.approx(kl, rel=1e-9)
    assert result.top1_agreement == pytest.approx(agreement)
    assert result.n_tokens == 24
    nothing = evaluate_divergence(model, full_keep(model), ids, batch_size=batch_size)
    assert nothing.kl == pytest.approx(0, abs=1e-12)
    assert nothing.top1_agreement == 1
