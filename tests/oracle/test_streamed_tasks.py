"""Tasks on streamed models, which are read once for many batches of requests."""

from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from heard import Heard
from keeps import logits_of, random_keep
from oracles.streamed import both, stream, written
from text_models import requests_of, task
from tiny_folder import SIZES, opened

from heapr_lab.pruning.surgery import masking
from heapr_lab.tasks.harness import run_tasks

TOKENS_AT_ONCE = 3500
"""The tokens of five requests or so."""


def answers(model: Any, tokenizer: Any, n: int = 4) -> list[tuple[float, bool]]:
    """What the streamed model says of `n` items."""
    from heapr_lab.tasks.harness_model import PackingHFLM

    lm = PackingHFLM(model, tokenizer)
    lm.tokens_at_once = TOKENS_AT_ONCE
    pairs: list[tuple[float, bool]] = lm.loglikelihood(requests_of(n))
    return pairs


def alone(model: Any, tokenizer: Any) -> list[tuple[float, bool]]:
    """The answer to each request, without padding, from all logits."""
    pairs = []
    for request in requests_of(4):
        context, continuation = (tokenizer(text).input_ids for text in request.args)
        log_p = logits_of(model, torch.tensor([context + continuation])).log_softmax(-1)
        of_each = log_p[0, len(context) - 1 : -1]
        value = of_each[range(len(continuation)), continuation].sum().item()
        pairs.append((value, of_each.argmax(-1).tolist() == continuation))
    return pairs


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "nemotron_h"]
)
def test_answers_are_those_in_memory(family, tokenizer, tmp_path):
    """To 1e-9 in float64, in batches of padded requests, with a mask and without."""
    whole, streamed = both(tmp_path, family, **SIZES)
    keep = random_keep(whole)
    # These compute a part of their layers in float32, where the padding matters.
    tolerance = 1e-5 if family in {"qwen3_next", "nemotron_h"} else 1e-9
    dense = alone(whole, tokenizer), answers(streamed, tokenizer)
    with masking(streamed, keep), masking(whole, keep):
        masked = alone(whole, tokenizer), answers(streamed, tokenizer)
    for expected, pairs in (dense, masked):
        values = [value for value, _ in expected]
        assert [value for value, _ in pairs] == pytest.approx(values, rel=tolerance)
        assert [greedy for _, greedy in pairs] == [greedy for _, greedy in expected]
    assert masked != dense


@pytest.mark.parametrize(("host_memory", "n_reads"), [("1GB", 1), (0, 6)])
def test_parts_are_read_once(host_memory, n_reads, tokenizer, tmp_path, monkeypatch):
    """By as many batches as the budget has room for: all of the six, or one."""
    folder = written(tmp_path, "qwen2_moe", **SIZES)
    streamed = opened(folder, stream=True, host_memory=host_memory)
    stream(streamed).drop()
    reader = stream(streamed).reader
    read = Mock(wraps=reader.read)
    monkeypatch.setattr(reader, "read", read)
    answers(streamed, tokenizer, n=7)
    numbers = [call.args[0] for call in read.mock_calls]
    assert Counter(numbers) == dict.fromkeys(range(-1, 3), n_reads)


def test_accuracies(tokenizer, tmp_path):
    """Rows, and the progress of every request."""
    heard = Heard()
    frames = [
        run_tasks(model, tokenizer, [task(7)], progress=heard)
        for model in both(tmp_path, "qwen2_moe", **SIZES)
    ]
    assert frames[0].equals(frames[1])
    assert heard == 2 * [(done, 28) for done in range(1, 29)]
