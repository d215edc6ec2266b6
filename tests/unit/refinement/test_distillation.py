"""The dense model as a teacher: its states are its own, and the loss is a mean."""

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import random_keep
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import evaluate_divergence
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.refinement.distillation import Teacher, check_positive

IDS = tiny_ids(n_sequences=5)


@pytest.fixture
def model() -> nn.Module:
    """A tiny qwen2_moe."""
    return tiny_model("qwen2_moe")


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_the_loss_is_a_mean_over_tokens(model: nn.Module, batch_size: int) -> None:
    """However many windows the dense model is run on at once."""
    keep = random_keep(model)
    teacher = Teacher(model, IDS, batch_size)
    assert teacher.ids is IDS
    for windows in ([3], [4, 0], range(5)):
        numbers = torch.tensor([*windows])
        with torch.no_grad():
            got = teacher.mean_kl(prune(model, keep), numbers)
        expected = evaluate_divergence(model, keep, IDS[numbers]).kl
        assert got.dtype == torch.float64
        assert got.item() == pytest.approx(expected, rel=1e-9)
        assert not got.requires_grad


def test_the_teacher_does_not_learn(model: nn.Module) -> None:
    """Gradients reach the student alone, and scale with what the loss is scaled by."""
    pruned = prune(model, random_keep(model))
    teacher = Teacher(model, IDS, 2)
    weight = pruned.model.norm.weight
    grads = []
    for scale in (1, 3):
        loss = scale * teacher.mean_kl(pruned, torch.tensor([0, 1]))
        (grad,) = torch.autograd.grad(loss, weight)
        grads.append(grad)
    torch.testing.assert_close(grads[1], 3 * grads[0])
    assert grads[0].abs().max() > 0
    everything = [*model.parameters(), pruned.lm_head.weight]
    teacher.mean_kl(pruned, torch.tensor([0])).backward()
    assert all(parameter.grad is None for parameter in everything)


def test_a_masked_teacher_is_refused(model: nn.Module) -> None:
    """Inside a mask the model is not the dense one."""
    remedy = "leave the masking.* block, and begin again with the dense model"
    with (
        masking(model, random_keep(model)),
        pytest.raises(SpecError, match=f"{remedy}$"),
    ):
        Teacher(model, IDS, 2)


def test_the_dense_model_runs_without_gradients_in_evaluation_mode(
    model: nn.Module,
) -> None:
    """And in the mode that it was in afterwards."""
    seen: list[tuple[bool, bool, int]] = []

    model.train()
    embeddings = model.get_input_embeddings()
    forward = embeddings.forward

    def watched(ids: torch.Tensor) -> torch.Tensor:
        seen.append((model.training, torch.is_grad_enabled(), len(ids)))
        return forward(ids)

    embeddings.forward = watched  # hooks would be refused
    Teacher(model, IDS, 2)
    assert seen == [(False, False, 2), (False, False, 2), (False, False, 1)]
    assert model.training


def test_positive_settings_pass() -> None:
    """The first that is not is named, with its value."""
    check_positive(n_steps=1, learning_rate=1e-9)
    with pytest.raises(SpecError, match=r"^b must be positive, got 0$"):
        check_positive(a=1, b=0, c=-1)
    with pytest.raises(SpecError, match=r"^c must be positive, got -0\.5$"):
        check_positive(c=-0.5)
