"""One experts function: which forward is masked, and what the probe counts."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, masked_logits, random_keep
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2MoeForCausalLM

from heapr_lab import KeepMask, masking
from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import probed
from heapr_lab.models.likelihood import token_nll

IDS = tiny_ids()


def implementation(model: nn.Module) -> str | None:
    """What the model's experts run through now."""
    return model.config._experts_implementation


# --- masks ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_dense_and_masked_forwards_at_once(family):
    """A dense and two differently masked threads on one model are all right."""
    model = tiny_model(family)
    keeps = [None, random_keep(model, seed=1), random_keep(model, seed=2)]

    def forward(keep: KeepMask | None) -> torch.Tensor:
        if keep is None:
            return logits_of(model, IDS)
        return masked_logits(model, IDS, keep)

    expected = [forward(keep) for keep in keeps]
    assert not torch.allclose(expected[0], expected[1])
    assert not torch.allclose(expected[1], expected[2])
    barrier = threading.Barrier(len(keeps), timeout=30)

    def repeat(keep: KeepMask | None, right: torch.Tensor) -> None:
        for _ in range(25):
            barrier.wait()
            assert torch.allclose(forward(keep), right, rtol=1e-10, atol=1e-10)

    with ThreadPoolExecutor(len(keeps)) as pool:
        list(pool.map(repeat, keeps, expected, timeout=60))
    assert implementation(model) == "eager"


class Recorded(TorchFunctionMode):
    """Notes every function whose result autograd records."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and look at what comes back."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.grad_fn is not None:
            self.names.append(func.__name__)
        return result


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_entering_a_mask_leaves_autograd_alone(family):
    """Views that autograd records, made by two threads at once, can deadlock torch."""
    model = tiny_model(family)
    keep = random_keep(model)
    with Recorded() as views:
        find_experts(model)[0].up_rows.transpose(0, 1)
    assert views.names  # of the test itself: so they would have been seen
    with Recorded() as recorded, masking(model, keep), probed(find_experts(model)):
        pass
    assert recorded.names == []


def test_nested_masks_keep_what_both_keep(model):
    """Inside two masks an atom stays where both keep it; outside, the outer rules."""
    first, second = random_keep(model, seed=1), random_keep(model, seed=2)
    both = KeepMask.from_arrays(
        {k: first.by_layer(k) & second.by_layer(k) for k in first.layers}
    )
    expected = masked_logits(model, IDS, both)
    with masking(model, first):
        outer = logits_of(model, IDS)
        with masking(model, second):
            assert torch.equal(logits_of(model, IDS), expected)
        assert torch.equal(logits_of(model, IDS), outer)
    assert not torch.allclose(outer, expected)


def test_models_that_share_a_config_are_masked_apart():
    """One config object behind two models neither breaks nor switches off a mask."""
    one = tiny_model("qwen2_moe")
    two = Qwen2MoeForCausalLM(one.config).to(torch.float64).eval()
    assert two.config is one.config
    keep = random_keep(one)
    dense_one, dense_two = logits_of(one, IDS), logits_of(two, IDS)
    with masking(one, keep):
        masked = logits_of(one, IDS)
        assert torch.equal(logits_of(two, IDS), dense_two)
        with masking(two, keep):
            assert not torch.allclose(logits_of(two, IDS), dense_two)
        assert torch.equal(logits_of(one, IDS), masked)
    assert torch.equal(logits_of(one, IDS), dense_one)
    assert implementation(one) == "eager"


def test_the_implementation_comes_back_after_an_exception():
    """Whatever happens inside, the model runs through what it ran through before."""
    model = tiny_model("qwen2_moe", dtype=torch.float32)
    keep = random_keep(model)
    for name in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        dense = logits_of(model, IDS)
        with pytest.raises(KeyError), masking(model, keep):
            raise KeyError
        assert implementation(model) == name
        assert torch.equal(logits_of(model, IDS), dense)
        with pytest.raises(KeyError), probed(find_experts(model)):
            raise KeyError
        assert implementation(model) == name


# --- the probe --------------------------------------------------------------------


def sums(model: nn.Module) -> dict[str, np.ndarray]:
    """Every running sum after a backward pass."""
    model.requires_grad_(False)
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _module, _args, output: output.requires_grad_(True)
    )
    with probed(find_experts(model)) as probes:
        token_nll(model, IDS).sum().backward()
    hook.remove()
    return {
        f"{number}.{name}": tensor.numpy()
        for number, probe in probes.items()
        for name, tensor in probe.state().items()
    }


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "gpt_oss"])
def test_checkpointing_counts_once(family):
    """A forward that runs twice under activation checkpointing is counted once."""
    model = tiny_model(family)
    expected, layers, forwards = sums(model), model.model.layers, []
    for layer in layers:

        def counted(*args: Any, forward: Any = layer.forward, **kwargs: Any) -> Any:
            forwards.append(forward)
            return forward(*args, **kwargs)

        layer.forward = functools.partial(checkpoint, counted, use_reentrant=False)
    got = sums(model)
    assert [forwards.count(f) for f in dict.fromkeys(forwards)] == [2] * len(layers)
    assert got["0.tokens"].sum() == IDS.numel() * 2
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        # Signed sums cancel: their rounding is that of the largest among them.
        atol = 1e-10 * np.abs(values).max()
        np.testing.assert_allclose(got[name], values, rtol=1e-10, atol=atol)


def test_only_passes_with_gradients_are_probed(model):
    """Forwards without gradients leave no trace, and neither do other models."""
    other = tiny_model("qwen2_moe", seed=3)
    with probed(find_experts(model)) as probes:
        logits_of(model, IDS)
        token_nll(other, IDS).sum().backward()
    assert all(probe.tokens.sum() == 0 for probe in probes.values())


def test_a_probe_inside_a_mask_sees_the_masked_model():
    """Measured inside a mask, dropped atoms have activation 0 and the others do not."""
    model = tiny_model("qwen2_moe")
    keep = random_keep(model)
    with masking(model, keep):
        got = sums(model)
    h2 = got["0.sum_h2"]
    routed = got["0.tokens"] > 0
    assert (h2[~keep.by_layer(0)] == 0).all()
    assert (h2[routed][keep.by_layer(0)[routed]] > 0).all()
