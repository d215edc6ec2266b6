"""Batches that fit, divergences by hand, and what is refused before a forward."""

import math
from unittest.mock import Mock

import pytest
import torch
from families import tiny_ids, tiny_model
from heard import Heard
from keeps import random_keep
from room import FULL, room_for

from heapr_lab import evaluate_divergence, evaluate_perplexity
from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import exp_nll, kl_divergence
from heapr_lab.models.likelihood import token_nll

# --- batches ----------------------------------------------------------------------


def test_batches_have_2048_tokens(model):
    """32 windows of 64 tokens; the last batch is what is left."""
    with room_for(100) as sizes:
        evaluate_perplexity(model, tiny_ids(n_sequences=33, seq_len=64))
    assert sizes == [32, 1]


def test_what_is_tried_again_counts_once(model):
    """Batches halve until they fit, and the sums are those of one batch."""
    ids, keep = tiny_ids(n_sequences=5), random_keep(model)
    whole = evaluate_perplexity(model, ids)
    apart = evaluate_divergence(model, keep, ids)
    heard = Heard()
    with room_for(3) as sizes:
        again = evaluate_perplexity(model, ids, progress=heard)
    assert again.nll == pytest.approx(whole.nll, rel=1e-12)
    assert sizes == [5, 2, 2, 1]
    assert heard == [(2, 5), (4, 5), (5, 5)]
    heard.clear()
    with room_for(1) as sizes:
        divergence = evaluate_divergence(model, keep, ids, progress=heard)
    assert heard == [(done, 5) for done in range(1, 6)]
    assert sizes == [5, 2, *[1] * 10]
    assert divergence.kl == pytest.approx(apart.kl, rel=1e-12)
    assert divergence.top1_agreement == apart.top1_agreement
    assert apart.n_tokens == 5 * 8


def test_a_batch_that_fails_halfway_counts_once(model):
    """Memory may run out in the masked half of a batch's work."""
    ids, keep = tiny_ids(n_sequences=4), random_keep(model)
    expected = evaluate_divergence(model, keep, ids)
    check = Mock(side_effect=[None, FULL, *[None] * 4])
    with model.get_input_embeddings().register_forward_pre_hook(check):
        divergence = evaluate_divergence(model, keep, ids)
    sizes = [len(call.args[1][0]) for call in check.mock_calls]
    assert sizes == [4, 4, 2, 2, 2, 2]
    assert divergence.kl == pytest.approx(expected.kl, rel=1e-12)


def test_nats_are_added_up_in_float64():
    """The model may be in float32, whose sums would round; ids may be lists."""
    model, ids = tiny_model("qwen2_moe", dtype=torch.float32), tiny_ids(n_sequences=40)
    with torch.no_grad():
        terms = token_nll(model, ids)
    assert terms.dtype == torch.float32
    expected = terms.double().sum().item() / terms.numel()
    result = evaluate_perplexity(model, ids.tolist(), batch_size=40)
    assert result.nll == pytest.approx(expected, rel=1e-13)
    assert result.value == pytest.approx(math.exp(expected), rel=1e-12)
    assert result.n_tokens == 40 * 8


@pytest.mark.parametrize("ids", [[[1.5, 2.5]], [1, 2], [[1], [2, 3]]])
def test_what_is_not_windows_is_refused(model, ids):
    """The message says what is expected."""
    with pytest.raises(SpecError, match="expected whole numbers"):
        evaluate_perplexity(model, ids)


# --- numbers ----------------------------------------------------------------------


def test_kl_where_one_model_excludes_a_token():
    """What p never does is free; what q never does, though p does, is infinite.

    What neither does adds nothing. Each row has its own.
    """
    p = torch.tensor([1.0, 0.0]).log()
    q = torch.tensor([0.5, 0.5]).log()
    assert kl_divergence(p, q).item() == pytest.approx(math.log(2))
    assert kl_divergence(q, p).item() == math.inf
    assert kl_divergence(p, p).item() == 0
    assert kl_divergence(torch.stack([p, p, q]), q).tolist() == pytest.approx(
        [math.log(2), math.log(2), 0]
    )


def test_the_exponential_overflows_to_infinity():
    """Below 709 nats it does not."""
    assert exp_nll(0.0) == 1
    assert exp_nll(700.0) == math.exp(700.0)
    assert exp_nll(710.0) == math.inf
