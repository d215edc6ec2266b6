"""Distillation of a dense model into its experts: its gradient, and resuming."""

import pytest
import torch
import torch.nn.functional as F
from carved_models import D_VOCAB, dense_model, student_of
from heard import Heard, stop_at
from stored_tensors import same_bits

from benchmarks.lab_model.healing import HealSpec, heal, kl_gradient
from heapr_lab.pretrained.carved import Layout

_LAYOUT = Layout.named("s4e5x4k2")
_IDS = torch.randint(D_VOCAB, (32, 16), generator=torch.Generator().manual_seed(5))
_SPEC = HealSpec(n_tokens=32 * 16, learning_rate=1e-2)


def test_the_gradient_is_that_of_autograd():
    """KL and its gradient, in float64."""
    generator = torch.Generator().manual_seed(0)
    states, wanted, head = (
        torch.randn(n, 8, generator=generator, dtype=torch.float64)
        for n in (700, 700, 13)  # more rows than are computed at once
    )
    states.requires_grad_()
    log_q = F.linear(states, head).log_softmax(-1)
    log_p = F.linear(wanted, head).log_softmax(-1)
    expected = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    expected.backward()
    kl, gradient = kl_gradient(states.detach(), wanted, head)
    assert kl == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, states.grad, rtol=1e-10, atol=1e-14)


def test_it_comes_nearer_to_the_dense_model():
    """The mean KL of the last steps is half of that of the first."""
    dense = dense_model()
    student = student_of(dense, _LAYOUT)
    losses = heal(
        student, dense, _IDS.repeat(8, 1), HealSpec(8 * 32 * 16, learning_rate=1e-2)
    )
    assert sum(losses[-16:]) < 0.5 * sum(losses[:16])


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path):
    """Weights, biases and losses, to the bit."""
    dense = dense_model()
    work = dense, _IDS, _SPEC
    whole = student_of(dense, _LAYOUT)
    expected = heal(whole, *work)
    state = tmp_path / "state.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.lab_model.healing._SAVE_SECONDS", 0.0)
        stop = stop_at(7, InterruptedError)
        with pytest.raises(InterruptedError):
            heal(student_of(dense, _LAYOUT), *work, state=state, on_step=stop)
    student = student_of(dense, _LAYOUT)
    steps = Heard()
    losses = heal(student, *work, state=state, on_step=steps)
    assert [step for step, *_ in steps] == [*range(7, 17)]  # the seventh was not saved
    assert losses == expected
    same_bits(student.state_dict(), whole.state_dict())


def test_without_a_rate_weights_stay():
    """Routers, scales and norms alone change."""
    dense = dense_model()
    student = student_of(dense, _LAYOUT)
    before = {name: p.clone() for name, p in student.named_parameters()}
    heal(student, dense, _IDS, HealSpec(8 * 16, learning_rate=0.0))
    changed = {
        name for name, p in student.named_parameters() if not p.equal(before[name])
    }
    kinds = ("router", "expert_scale", "norm")
    assert changed
    assert all(any(kind in name for kind in kinds) for name in changed)


def test_starved_experts_are_lifted():
    """An expert that is never chosen gains half a step."""
    dense = dense_model()
    student = student_of(dense, _LAYOUT)
    for layer in student.model.layers:
        layer.mlp.bias[0] = -10.0  # never chosen
    heal(student, dense, _IDS, HealSpec(4 * 16, learning_rate=0.0, lift=1.0))
    for layer in student.model.layers:
        assert layer.mlp.bias[0] == pytest.approx(-9.0)  # 2 steps of half a unit
