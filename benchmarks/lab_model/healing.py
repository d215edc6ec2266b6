"""Distil a dense model into the experts that were carved from it.

The loss is KL(dense ‖ carved) of the next token alone: the next-token loss itself would
adapt the model to the corpora, and flatter it on them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.lab_model.carved_ffn import load_shares
from heapr_lab.refinement.healing import restore_training, save_training, share_of_rate

_SAVE_SECONDS = 300.0
_ROWS_AT_ONCE = 512
_STARVED = 0.5
"""Experts with less of their fair share are chosen more readily."""


@dataclass(frozen=True)
class HealSpec:
    """Everything that determines a run of healing, model and windows aside."""

    n_tokens: int
    batch_size: int = 2
    learning_rate: float = 2e-4
    """The rate of the experts' weights; 0 trains routers, norms and scales alone."""
    router_rate: float = 5e-3
    """The rate of the routers, relative to the mean size of their weights."""
    norm_rate: float = 1e-3
    """The rate of norms and of the experts' scales."""
    lift: float = 1e-3
    """Step of the correction bias of starved experts."""
    warmup_steps: int = 10

    def n_steps(self, seq_len: int) -> int:
        """Steps of the run."""
        return max(1, self.n_tokens // (self.batch_size * seq_len))

    def n_windows(self, seq_len: int) -> int:
        """Windows of the run, each of which is used once."""
        return self.n_steps(seq_len) * self.batch_size


def heal(
    student: Any,
    teacher: Any,
    ids: torch.Tensor,
    spec: HealSpec,
    *,
    state: Path | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> list[float]:
    """Train `student` in place on consecutive windows of `ids`; the KL of each step.

    Args:
        student: a model whose `mlp` are `CarvedFfn`.
        teacher: the dense model.
        ids: windows of tokens in the order of training, (n_windows, seq_len).
        spec: lengths and rates.
        state: file from which an interrupted run goes on.
        on_step: called after each step with (step, n_steps, KL in nats per token).
    """
    groups = _trained(student, spec)
    optimizer = torch.optim.AdamW(
        [{"params": group, "lr": rate, "base": rate} for group, rate in groups if rate],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=True,
    )
    n_steps = spec.n_steps(ids.shape[1])
    losses = [] if state is None else _restored(state, student, optimizer)
    saved_at = time.monotonic()
    for step in range(len(losses), n_steps):
        first = step * spec.batch_size % len(ids)
        batch = ids[first : first + spec.batch_size]
        for group in optimizer.param_groups:
            share = share_of_rate(step, n_steps, spec.warmup_steps)
            group["lr"] = group["base"] * share
        losses.append(_step(student, teacher, batch, optimizer))
        _lift_starved(student, spec.lift)
        if on_step is not None:
            on_step(step + 1, n_steps, losses[-1])
        late = time.monotonic() - saved_at > _SAVE_SECONDS or step + 1 == n_steps
        if state is not None and late:
            _save(state, student, optimizer, losses)
            saved_at = time.monotonic()
    return losses


def _trained(student: Any, spec: HealSpec) -> list[tuple[list[nn.Parameter], float]]:
    """Groups of parameters, which alone require gradients, with their rates."""
    student.requires_grad_(False)
    ffns = [layer.mlp for layer in student.model.layers]
    weights = [w for f in ffns for w in (f.gate_proj, f.up_proj, f.down_proj)]
    routers = [ffn.router for ffn in ffns]
    small = [ffn.expert_scale for ffn in ffns] + [
        weight for name, weight in student.named_parameters() if "norm" in name
    ]
    size = float(torch.cat([w.detach().flatten() for w in routers]).abs().mean())
    groups = [
        (weights, spec.learning_rate),
        (routers, spec.router_rate * size),
        (small, spec.norm_rate),
    ]
    for group, rate in groups:
        for parameter in group:
            parameter.requires_grad_(rate > 0)
    return groups


def _step(
    student: Any, teacher: Any, batch: torch.Tensor, optimizer: torch.optim.Optimizer
) -> float:
    with torch.no_grad():
        wanted = teacher.model(input_ids=batch, use_cache=False).last_hidden_state
    states = student.model(input_ids=batch, use_cache=False).last_hidden_state
    kl, gradient = kl_gradient(
        states.detach().flatten(0, 1), wanted.flatten(0, 1), teacher.lm_head.weight
    )
    states.backward(gradient.view_as(states))
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return kl


@torch.no_grad()
def kl_gradient(
    states: torch.Tensor, wanted: torch.Tensor, head: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Mean KL(softmax(head·wanted) ‖ softmax(head·states)), and its gradient by states.

    Never more than some rows of logits are in memory.

    Shapes: states, wanted, gradient (n, d_model); head (d_vocab, d_model).
    """
    total, gradients = 0.0, []
    pairs = zip(states.split(_ROWS_AT_ONCE), wanted.split(_ROWS_AT_ONCE), strict=True)
    for state, target in pairs:
        log_q = F.linear(state, head).log_softmax(-1)
        log_p = F.linear(target, head).log_softmax(-1)
        p = log_p.exp()
        total += float((p * (log_p - log_q)).sum())
        gradients.append((log_q.exp() - p) @ head)
    return total / len(states), torch.cat(gradients) / len(states)


def _lift_starved(student: Any, step: float) -> None:
    """Raise the correction biases of experts that get little of their fair share."""
    shares = load_shares(student)
    for layer, share in zip(student.model.layers, shares, strict=True):
        layer.mlp.bias += step * (_STARVED - share).clamp(min=0)
        layer.mlp.load *= 0.9


def _save(
    path: Path, student: Any, optimizer: torch.optim.Optimizer, losses: list[float]
) -> None:
    tensors = {"losses": torch.tensor(losses, dtype=torch.float64)}
    for index, layer in enumerate(student.model.layers):
        tensors[f"bias.{index}"] = layer.mlp.bias
        tensors[f"load.{index}"] = layer.mlp.load
    save_training(path, _by_name(student), optimizer, tensors)


def _restored(
    path: Path, student: Any, optimizer: torch.optim.Optimizer
) -> list[float]:
    """The losses of the steps that were done; student and optimizer as they were."""
    if not path.exists():
        return []
    tensors = restore_training(path, _by_name(student), optimizer)
    for index, layer in enumerate(student.model.layers):
        layer.mlp.bias.copy_(tensors[f"bias.{index}"])
        layer.mlp.load = tensors[f"load.{index}"]
    losses: list[float] = tensors["losses"].tolist()
    return losses


def _by_name(student: Any) -> dict[str, nn.Parameter]:
    """The parameters that are trained."""
    return {name: p for name, p in student.named_parameters() if p.requires_grad}
