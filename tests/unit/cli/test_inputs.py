"""Tokens, windows and counts that a model cannot be asked with are one line each."""

import logging

import numpy as np
import pytest
from families import D_VOCAB, tiny_ids, tiny_model, tiny_windows
from heard import Heard
from keeps import full_keep
from transformers import GPT2Config, GPT2LMHeadModel

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import evaluate_divergence, evaluate_perplexity
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.refinement.activation_grams import iter_grams
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.tasks.harness import run_tasks
from heapr_lab.text.calibration import CalibrationSet

IDS = tiny_ids(n_sequences=4)


# --- token ids --------------------------------------------------------------------


@pytest.mark.parametrize("bad", [D_VOCAB, D_VOCAB + 1000, -1])
def test_ids_outside_the_vocabulary_are_named(model, bad):
    """They are found before anything runs, even in the last of many windows."""
    ids = IDS.clone()
    ids[3, 5] = bad
    windows = CalibrationSet.from_ids(ids)
    keep, done = full_keep(model), Heard()
    for call in (
        lambda: evaluate_perplexity(model, ids, batch_size=1, progress=done),
        lambda: evaluate_divergence(model, keep, ids, batch_size=1, progress=done),
        lambda: collect_statistics(model, windows, batch_size=1, progress=done),
        lambda: [*iter_grams(model, windows, span="expert", progress=done)],
        lambda: fit_compensation(model, keep, windows, progress=done),
    ):
        message = f"token id {bad} at window 3, position 5 .* vocabulary of {D_VOCAB}"
        with pytest.raises(SpecError, match=message):
            call()
    assert len(done) == 0


# --- counts -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1.5, True])
def test_batch_sizes_are_whole_numbers_from_one(model, size):
    """The check is the same in a pass and in an evaluation."""
    message = "batch_size must be a whole number from 1, got"
    windows = CalibrationSet.from_ids(IDS)
    keep = full_keep(model)
    for call in (
        lambda: collect_statistics(model, windows, batch_size=size),
        lambda: evaluate_perplexity(model, IDS, batch_size=size),
        lambda: evaluate_divergence(model, keep, IDS, batch_size=size),
    ):
        with pytest.raises(SpecError, match=message):
            call()
    assert evaluate_perplexity(model, IDS, batch_size=np.int64(2)).n_tokens == 32


@pytest.mark.parametrize("limit", [0, -1, 0.5])
def test_limits_of_tasks_are_whole_numbers(model, limit):
    """The harness would take a half as a share, and 0 as all."""
    with pytest.raises(SpecError, match="limit must be a whole number from 1"):
        run_tasks(model, None, "piqa", limit=limit)


# --- positions --------------------------------------------------------------------


def test_long_windows_of_rotary_positions_are_told_once(caplog):
    """Beyond 64 positions: one warning for each model; up to them: none."""
    model = tiny_model("qwen2_moe")
    evaluate_perplexity(model, tiny_ids(seq_len=64))
    assert not caplog.text
    for _ in range(2):
        collect_statistics(model, tiny_windows(seq_len=65))
        evaluate_perplexity(model, tiny_ids(seq_len=66))
    assert [record.message for record in caplog.records] == [
        "windows of 65 tokens are longer than the 64 positions that "
        "Qwen2MoeForCausalLM was made for"
    ]
    assert caplog.records[0].levelno == logging.WARNING
    evaluate_perplexity(tiny_model("qwen2_moe"), tiny_ids(seq_len=65))
    assert len(caplog.records) == 2


def test_long_windows_of_learned_positions_are_refused():
    """There is no position 17 to look up."""
    sizes = {"vocab_size": D_VOCAB, "n_positions": 16, "n_embd": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_layer=1, n_head=2)).eval()
    assert evaluate_perplexity(model, tiny_ids(seq_len=16)).n_tokens == 45
    with pytest.raises(SpecError, match=r"the 16 positions .* give seq_len=16 or less"):
        evaluate_perplexity(model, tiny_ids(seq_len=17))
