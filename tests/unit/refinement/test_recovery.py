"""Recovery runs: only experts learn, they do learn, and nothing else changes."""

from pathlib import Path

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep
from torch import nn
from transformers import AutoModelForCausalLM

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.models.modes import evaluating
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement.distillation import Teacher
from heapr_lab.refinement.recovery import expert_weights, recover
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=6))


@pytest.fixture
def dense() -> nn.Module:
    """A tiny qwen2_moe in float32."""
    return tiny_model("qwen2_moe", dtype=torch.float32)


def pruned_of(dense: nn.Module) -> nn.Module:
    """Half of the atoms are gone: one expert is empty, one whole."""
    return prune(dense, random_keep(dense))


def loss_of(pruned: nn.Module, dense: nn.Module) -> float:
    """Mean KL(dense || pruned) on the windows."""
    teacher = Teacher(dense, WINDOWS.ids, batch_size=6)
    with evaluating(pruned):
        return teacher.mean_kl(pruned, torch.arange(6)).item()


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "nemotron_h"])
def test_only_experts_learn(family: str) -> None:
    """Their weights change and the loss falls; all else of both models is untouched."""
    dense = tiny_model(family, dtype=torch.float32)
    pruned = pruned_of(dense)
    before = {name: p.clone() for name, p in pruned.named_parameters()}
    teacher = {name: p.clone() for name, p in dense.named_parameters()}
    start = loss_of(pruned, dense)
    assert recover(pruned, dense, WINDOWS, n_steps=20, learning_rate=1e-2) is pruned
    assert loss_of(pruned, dense) < 0.7 * start
    trained = {id(parameter) for parameter in expert_weights(pruned)}
    for name, parameter in pruned.named_parameters():
        assert torch.equal(parameter, before[name]) == (id(parameter) not in trained)
    for name, parameter in dense.named_parameters():
        assert torch.equal(parameter, teacher[name])
        assert parameter.requires_grad
        assert parameter.grad is None


def test_a_seed_gives_one_model(dense: nn.Module) -> None:
    """The same weights again, whatever random numbers were drawn in between."""
    options = {"n_steps": 3, "batch_size": 2, "learning_rate": 1e-2}
    models = []
    for seed in (5, 5, 6):
        torch.rand(3)
        models.append(recover(pruned_of(dense), dense, WINDOWS, seed=seed, **options))
    one, two, other = (logits_of(model, WINDOWS.ids) for model in models)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_model_is_left_as_it_was(dense: nn.Module) -> None:
    """Flags, modes and configuration come back, and gradients are gone."""
    pruned = pruned_of(dense)
    pruned.config.use_cache = True
    pruned.lm_head.weight.requires_grad_(False)
    pruned.model.layers[1].train()
    flags = [p.requires_grad for p in pruned.parameters()]
    modes = [module.training for module in pruned.modules()]
    recover(pruned, dense, WINDOWS, n_steps=2)
    assert [p.requires_grad for p in pruned.parameters()] == flags
    assert [module.training for module in pruned.modules()] == modes
    assert pruned.config.use_cache
    assert all(p.grad is None for p in pruned.parameters())


def test_nothing_is_written_or_printed(
    dense: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No checkpoints, no bars, no report; progress is called after each step."""
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[int, int]] = []
    recover(
        pruned_of(dense),
        dense,
        WINDOWS,
        n_steps=4,
        batch_size=4,
        progress=lambda *done: seen.append(done),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_recovered_model_saves_and_loads(dense: nn.Module, tmp_path: Path) -> None:
    """What `save_pruned` writes gives the logits of the trained model."""
    pruned = recover(pruned_of(dense), dense, WINDOWS, n_steps=3, learning_rate=1e-2)
    folder = save_pruned(pruned, tmp_path / "recovered")
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = logits_of(pruned, WINDOWS.ids)
    torch.testing.assert_close(logits_of(loaded, WINDOWS.ids), expected)


def test_a_loaded_model_recovers(dense: nn.Module, tmp_path: Path) -> None:
    """A pruned checkpoint is trained as the model that was saved is."""
    pruned = pruned_of(dense)
    folder = save_pruned(pruned, tmp_path / "pruned")
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"n_steps": 3, "learning_rate": 1e-2}
    expected = logits_of(recover(pruned, dense, WINDOWS, **options), WINDOWS.ids)
    got = logits_of(recover(loaded, dense, WINDOWS, **options), WINDOWS.ids)
    torch.testing.assert_close(got, expected)


def test_what_cannot_be_trained_is_refused(dense: nn.Module) -> None:
    """A model that was not sliced, and numbers that are not positive."""
    with pytest.raises(SpecError, match="no sliced experts to train"):
        recover(dense, dense, WINDOWS)
    pruned = pruned_of(dense)
    for name in ("n_steps", "batch_size", "learning_rate"):
        with pytest.raises(SpecError, match=f"{name} must be positive, got 0"):
            recover(pruned, dense, WINDOWS, **{name: 0})


# --- how it learns ----------------------------------------------------------------


def test_it_is_adam_with_a_warm_up_and_clipped_gradients() -> None:
    """Step by step by hand: full batches, the rate up over a tenth and down to 0."""
    dense = tiny_model("qwen2_moe")
    pruned, twin = pruned_of(dense), pruned_of(dense)
    n_steps, rate = 20, 1e-2
    recover(pruned, dense, WINDOWS, n_steps=n_steps, batch_size=6, learning_rate=rate)
    weights = expert_weights(twin)
    optimizer = torch.optim.Adam(weights, lr=rate)
    log_p = logits_of(dense, WINDOWS.ids)[:, :-1].log_softmax(-1)
    for step in range(n_steps):
        rising, falling = step / 2, (n_steps - step) / (n_steps - 2)
        optimizer.param_groups[0]["lr"] = rate * min(rising, falling)
        log_q = twin(WINDOWS.ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        grads = torch.autograd.grad(loss, weights)
        size = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad * min(1.0, 1.0 / float(size))
        optimizer.step()
    for found, expected in zip(expert_weights(pruned), weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def watch_windows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The windows of each step, which are run in evaluation mode."""
    seen: list[tuple[int, ...]] = []
    mean_kl = Teacher.mean_kl

    def noted(self: Teacher, model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
        assert not any(module.training for module in model.modules())
        seen.append(tuple(windows.tolist()))
        return mean_kl(self, model, windows)

    monkeypatch.setattr(Teacher, "mean_kl", noted)
    return seen


def test_every_window_is_seen_as_often(
    dense: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many of them in each step, in another order each time round."""
    seen = watch_windows(monkeypatch)
    recover(pruned_of(dense), dense, WINDOWS, n_steps=6, batch_size=2)
    assert [len(windows) for windows in seen] == [2] * 6
    first, second = sum(seen[:3], ()), sum(seen[3:], ())
    assert sorted(first) == sorted(second) == [*range(6)]
    assert first != second


def test_defaults_are_200_steps_of_8_windows(
    dense: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless others are asked for."""
    seen = watch_windows(monkeypatch)
    more = CalibrationSet.from_ids(WINDOWS.ids.repeat(2, 1))

    def stop(*done: int) -> None:
        assert done == (1, 200)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        recover(pruned_of(dense), dense, more, progress=stop)
    assert len(seen[0]) == 8


def test_the_rate_is_a_ten_thousandth_and_the_seed_0(dense: nn.Module) -> None:
    """Unless others are asked for."""
    options = {"n_steps": 2, "batch_size": 2}
    by_default = recover(pruned_of(dense), dense, WINDOWS, **options)
    options |= {"seed": 0, "learning_rate": 1e-4}
    asked = recover(pruned_of(dense), dense, WINDOWS, **options)
    expected = logits_of(asked, WINDOWS.ids)
    assert torch.equal(logits_of(by_default, WINDOWS.ids), expected)


def test_a_recovered_model_says_so(dense: nn.Module) -> None:
    """After what was done to its weights before."""
    pruned, done = pruned_of(dense), "sliced"
    for size in (2, 3):
        recover(pruned, dense, WINDOWS, n_steps=1, batch_size=size)
        done += "; then the experts distilled from the dense model in 1 steps of "
        done += f"{size} windows"
        assert pruned.heapr_weights == done


def test_the_norm_of_an_output_is_no_expert_s_weight(dense: nn.Module) -> None:
    """It is all experts', as a router is."""
    for layer in find_experts(dense):
        layer.module.has_post_expert_norm = True
        layer.module.post_expert_norm = nn.LayerNorm(16)
    pruned = pruned_of(dense)
    found = {id(weight) for weight in expert_weights(pruned)}
    names = {name for name, p in pruned.named_parameters() if id(p) in found}
    assert names == {
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in (0, 1)
        for name in ("up_rows", "down_columns")
    }
