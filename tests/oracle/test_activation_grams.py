"""Sums of products of routed activations, against every token's own features."""

import threading
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep
from oracles import token_by_token
from oracles.features import Features

from heapr_lab.errors import CoverageError
from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import observed
from heapr_lab.pruning.surgery import masking
from heapr_lab.refinement.activation_grams import collect_grams
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=8, seq_len=24))
CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "gpt_oss", "nemotron_h", "deepseek_v2"]
)
def test_sums_of_an_expert_token_by_token(family: str) -> None:
    """Σ (p h)(p h)ᵀ over the tokens that each expert was routed to, one by one."""
    model = tiny_model(family)
    grams = collect_grams(model, WINDOWS)
    _, records = token_by_token.run(model, WINDOWS.ids)
    for layer in find_experts(model):
        gram = grams[layer.layer]
        for expert, total in enumerate(gram.total):
            tokens = records[id(layer.module)].tokens.get(expert, [])
            assert int(gram.tokens.sum(0)[expert]) == len(tokens)
            expected = torch.zeros_like(total)
            for token in tokens:
                feature = (token.p * token.h).detach()
                expected += torch.outer(feature, feature)
            torch.testing.assert_close(total, expected, **CLOSE)


def test_sums_are_the_dense_model_s_within_a_mask_too() -> None:
    """Another mask in this thread does not reach them, nor a forward of another one."""
    model = tiny_model("qwen2_moe")
    expected = collect_grams(model, WINDOWS)
    with masking(model, random_keep(model)):
        grams = collect_grams(model, WINDOWS)
    for layer, gram in expected.items():
        torch.testing.assert_close(grams[layer].sums, gram.sums, **CLOSE)


def test_another_thread_s_forward_is_not_summed() -> None:
    """What is watched is this thread's, as masks are."""
    model = tiny_model("qwen2_moe")
    layers = find_experts(model)
    observers = [Features(layer.n_experts) for layer in layers]
    with observed(layers, observers):
        thread = threading.Thread(target=logits_of, args=(model, WINDOWS.ids))
        thread.start()
        thread.join()
    assert not any(observer.parts for observer in observers)


def test_a_layer_takes_part_once_in_every_forward() -> None:
    """One that is skipped, or runs twice, would leave sums of other tokens."""
    for times, seen in ((0, 0), (2, 4)):
        model = tiny_model("qwen2_moe")
        mlp = model.model.layers[1].mlp
        forward = mlp.forward

        def run(
            x: torch.Tensor, times: int = times, forward: Any = forward
        ) -> torch.Tensor:
            return sum((forward(x) for _ in range(times)), torch.zeros_like(x))

        mlp.forward = run
        text = f"layer 1 took part in {seen} of 2 forwards, expected all"
        with pytest.raises(CoverageError, match=text):
            collect_grams(model, WINDOWS)
