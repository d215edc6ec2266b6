"""Learning from the dense model: its predictions on fixed windows.

Shapes: n windows, L tokens in each. Source: Hinton et al. 2015, at temperature 1.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import kl_divergence
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.models.likelihood import final_states, iter_log_probs
from heapr_lab.models.modes import evaluating


def check_positive(**numbers: float) -> None:
    """Check that settings are positive.

    Raises:
        SpecError: one is not; names it.
    """
    for name, number in numbers.items():
        if number <= 0:
            raise SpecError(f"{name} must be positive, got {number}")


class Teacher:
    """The dense model on fixed windows; its layers are run on them once.

    Attributes:
        model: the dense model.
        ids: token ids, (n, L).
    """

    def __init__(self, model: nn.Module, ids: torch.Tensor, batch_size: int) -> None:
        """Run `model` on `ids`, `batch_size` windows at a time.

        Raises:
            SpecError: an active mask, autocast or hook changes what `model` computes.
        """
        refuse_disturbed(model, remedy="begin again with the dense model")
        self.model = model
        self.ids = ids
        with evaluating(model):
            parts = [
                final_states(model, part)[:, :-1].cpu()
                for part in ids.split(batch_size)
            ]
        self._states = torch.cat(parts)

    def mean_kl(self, model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
        """Mean KL(dense || model) per predicted token, in nats; differentiable.

        Shapes: windows, indices of windows, (n_batch,); result ().
        """
        states = final_states(model, self.ids[windows])[:, :-1]
        dense = self._states[windows].to(states.device)
        result: torch.Tensor = _MeanKL.apply(states, model, dense, self.model)
        return result


class _MeanKL(torch.autograd.Function):
    """Mean KL of the predictions of two models, from their final states.

    The gradient is computed together with the value, chunk by chunk, so that the logits
    of a large vocabulary never exist all at once and no head runs twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        model: nn.Module,
        dense_states: torch.Tensor,
        dense: nn.Module,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad[0]
        leaf = states.detach().requires_grad_(wanted)
        n_tokens = leaf[..., 0].numel()
        total = torch.zeros((), dtype=torch.float64, device=leaf.device)
        with torch.set_grad_enabled(wanted):
            for log_p, log_q in zip(
                iter_log_probs(dense, dense_states),
                iter_log_probs(model, leaf),
                strict=True,
            ):
                kl = kl_divergence(log_p.detach(), log_q).sum() / n_tokens
                if wanted:
                    kl.backward(inputs=[leaf])
                total += kl.detach().to(total.device)
        ctx.save_for_backward(leaf.grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None
