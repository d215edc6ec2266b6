"""Layer-wise distillation: only experts learn, each layer from the dense one's."""

import pytest
import torch
from families import REPRESENTATIVES, tiny_ids, tiny_model
from keeps import logits_of, random_keep
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts, sliced_experts
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.refinement.expert_calls import iter_expert_calls
from heapr_lab.refinement.layer_distillation import distill_layers
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=48))
FAMILIES = ["qwen2_moe", "gpt_oss", "nemotron_h", "deepseek_v2"]
SETTINGS = {"n_steps": 30, "batch_tokens": 32, "learning_rate": 0.1}


def weights_of(pruned: nn.Module) -> list[nn.Parameter]:
    """The weights of the routed experts, but for a norm of their output."""
    experts = sliced_experts(pruned).values()
    return [p for module in experts for p in module.parameters(recurse=False)]


@pytest.fixture
def dense() -> nn.Module:
    """A tiny qwen2_moe in float32."""
    return tiny_model("qwen2_moe", dtype=torch.float32)


def pruned_of(dense: nn.Module) -> nn.Module:
    """Half of the atoms are gone: one expert is empty, one whole."""
    return prune(dense, random_keep(dense))


def error_by_hand(pruned: nn.Module, dense: nn.Module) -> list[float]:
    """By layer: relative squared error on the inputs of the dense model's experts."""
    held_out = WINDOWS.split()[1].ids
    seen: dict[str, tuple[torch.Tensor, ...]] = {}
    hooks = [
        layer.module.register_forward_hook(
            lambda _m, args, kwargs, out, name=layer.name: seen.__setitem__(
                name, (*args, *kwargs.values(), out)
            ),
            with_kwargs=True,
        )
        for layer in find_experts(dense)
    ]
    logits_of(dense, held_out)
    for hook in hooks:
        hook.remove()
    found = []
    for name, (x, index, p, wanted) in seen.items():
        with torch.no_grad():
            missing = pruned.get_submodule(name)(x, index, p) - wanted
        found.append(float(missing.square().sum() / wanted.square().sum()))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_only_experts_learn(family: str) -> None:
    """Errors on held-out tokens fall; all else of both models is untouched."""
    dense = tiny_model(family, dtype=torch.float32)
    pruned = pruned_of(dense)
    before = {name: p.clone() for name, p in pruned.named_parameters()}
    teacher = {name: p.clone() for name, p in dense.named_parameters()}
    errors = error_by_hand(pruned, dense)
    assert distill_layers(pruned, dense, WINDOWS, **SETTINGS) is pruned
    report = pruned.heapr_distillation
    assert report["before"].tolist() == pytest.approx(errors, rel=1e-4)
    assert report["after"].tolist() == pytest.approx(
        error_by_hand(pruned, dense), rel=1e-4
    )
    assert report["way"].max() > 0
    trained = {id(parameter) for parameter in weights_of(pruned)}
    for name, parameter in pruned.named_parameters():
        if id(parameter) not in trained:
            assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    for name, parameter in dense.named_parameters():
        assert torch.equal(parameter, teacher[name])
        assert parameter.requires_grad


def test_held_out_errors_never_rise(dense: nn.Module) -> None:
    """Steps that are far too long change no layer."""
    pruned = pruned_of(dense)
    before = {name: p.clone() for name, p in pruned.named_parameters()}
    distill_layers(pruned, dense, WINDOWS, n_steps=3, learning_rate=1e3)
    assert pruned.heapr_distillation["way"].tolist() == [0, 0]
    for name, parameter in pruned.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_whole_model_stays(dense: nn.Module) -> None:
    """Where nothing is pruned, there is no error, and no weight changes."""
    keep = random_keep(dense)
    whole = type(keep)(
        {k: v | True for k, v in keep.arrays.items()}, dict(keep.settings)
    )
    pruned = prune(dense, whole)
    distill_layers(pruned, dense, WINDOWS, n_steps=2)
    assert pruned.heapr_distillation["after"].max() < 1e-10
    torch.testing.assert_close(
        logits_of(pruned, WINDOWS.ids), logits_of(dense, WINDOWS.ids)
    )


def test_each_layer_learns_from_the_dense_models_inputs(dense: nn.Module) -> None:
    """Masking the first layer does not change what the second one learns."""
    keep = random_keep(dense)
    first, second = find_experts(dense)
    other = {**keep.arrays, first.layer: keep.arrays[first.layer] | True}
    models = [
        distill_layers(prune(dense, own), dense, WINDOWS, **SETTINGS)
        for own in (keep, type(keep)(other, dict(keep.settings)))
    ]
    one, two = (model.get_submodule(second.name).up_rows for model in models)
    assert torch.equal(one, two)


def test_a_seed_gives_one_model(dense: nn.Module) -> None:
    """The same weights again, whatever random numbers were drawn in between."""
    models = []
    for seed in (5, 5, 6):
        torch.rand(3)
        own = pruned_of(dense)
        models.append(distill_layers(own, dense, WINDOWS, seed=seed, **SETTINGS))
    one, two, other = (logits_of(model, WINDOWS.ids) for model in models)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_16_bits_are_trained_in_float32(dense: nn.Module) -> None:
    """The result is that of float32, rounded once."""
    low = tiny_model("qwen2_moe", dtype=torch.bfloat16)
    pruned = distill_layers(pruned_of(low), low, WINDOWS, **SETTINGS)
    assert pruned.heapr_distillation["way"].max() > 0
    assert {p.dtype for p in weights_of(pruned)} == {torch.bfloat16}


def test_progress_and_description(dense: nn.Module) -> None:
    """Steps of all layers; the model says what was done to it."""
    seen: list[tuple[int, int]] = []
    pruned = distill_layers(
        pruned_of(dense), dense, WINDOWS, n_steps=3, progress=lambda *d: seen.append(d)
    )
    assert seen == [(k, 6) for k in range(1, 7)]
    assert "in 3 steps of 2048 tokens" in pruned.heapr_weights


def test_what_cannot_be_distilled_is_refused(dense: nn.Module) -> None:
    """Another model, one that was not sliced, a mask, and numbers that mean nothing."""
    pruned = pruned_of(dense)
    with pytest.raises(SpecError, match="has 0 layers of sliced experts"):
        distill_layers(dense, dense, WINDOWS)
    with pytest.raises(SpecError, match="expected those of the dense"):
        distill_layers(pruned, tiny_model("deepseek_v2"), WINDOWS)
    with (
        masking(dense, random_keep(dense)),
        pytest.raises(SpecError, match="begin again"),
    ):
        distill_layers(pruned, dense, WINDOWS)
    with pytest.raises(SpecError, match="there is 1 window"):
        distill_layers(pruned, dense, CalibrationSet.from_ids(WINDOWS.ids[:1]))
    for name in ("n_steps", "batch_tokens", "learning_rate"):
        with pytest.raises(SpecError, match=f"{name} must be positive, got 0"):
            distill_layers(pruned, dense, WINDOWS, **{name: 0})


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_calls_are_those_of_a_forward_pass(family: str) -> None:
    """One layer at a time, of several batches, in the order of the tokens."""
    dense = tiny_model(family)
    ids = tiny_ids(n_sequences=5)
    layers = find_experts(dense)
    found = {layer.layer: calls for layer, calls in iter_expert_calls(dense, ids)}
    assert sorted(found) == [layer.layer for layer in layers]
    for layer in layers:
        calls = found[layer.layer]
        assert not calls.top_k_index.is_floating_point()
        assert calls.hidden_states.shape == (ids.numel(), layer.d_expert)
        with torch.no_grad():
            again = layer.module(
                calls.hidden_states, calls.top_k_index, calls.top_k_weights
            )
        torch.testing.assert_close(again, calls.output)


def test_progress_of_calls_counts_decoder_layers() -> None:
    """Those without experts, too."""
    done: list[tuple[int, int]] = []
    ids = tiny_ids(n_sequences=2)
    dense = tiny_model("deepseek_v2")
    for _ in iter_expert_calls(dense, ids, progress=lambda *d: done.append(d)):
        pass
    assert done == [(1, 3), (2, 3), (3, 3)]
