"""Distil the experts of a pruned model from the dense model's, layer by layer.

Compensation changes W_down alone, in closed form. Here a few steps of gradient descent
change the rows of W_gate and W_up of the kept atoms, too, so that each layer's experts
return what the dense ones return on the calibration tokens:

    min  Σ_t ‖Σ_e p_te E'_e(x_t) − Σ_e p_te E_e(x_t)‖²

with the inputs x and the routing weights p of the dense model. It needs no labels, no
logits and no backward pass through the model, and memory for one layer at a time.
Three of every four windows are fitted to; how far a layer goes from its old weights to
the new ones is chosen by the error on the others, so that it never rises there.

Source: this project; layer-wise distillation as in Hubara et al. 2021 and others.

Shapes: T tokens, D d_expert.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.experts import sliced_experts
from heapr_lab.models.ragged_experts import RaggedExperts
from heapr_lab.progress import Parts, Progress
from heapr_lab.refinement.expert_calls import ExpertCalls
from heapr_lab.refinement.students import lessons, note_change
from heapr_lab.text.calibration import CalibrationSet

N_STEPS = 100
_BATCH_TOKENS = 2048
_LEARNING_RATE = 0.1
_WARM_UP = 0.1
_WAYS = (0.25, 0.5, 1.0)
"""How far weights may go from the old to the new ones, besides not at all."""


def distill_layers(
    pruned: nn.Module,
    dense: nn.Module,
    calibration: CalibrationSet,
    *,
    n_steps: int = N_STEPS,
    batch_tokens: int = _BATCH_TOKENS,
    learning_rate: float = _LEARNING_RATE,
    seed: int = 0,
    progress: Progress | None = None,
) -> nn.Module:
    """Train each layer's experts, in place, to return what the dense ones return.

    Adam without weight decay; the learning rate increases over the first tenth of the
    steps and decreases to 0 over the rest. Weights of 16 bits are trained in float32
    and rounded once, at the end.

    The cost is one forward pass of the dense model, and n_steps · batch_tokens tokens
    forward and backward through the kept atoms alone.

    Args:
        pruned: the pruned model, made from `dense` by `prune`, `compensate` or
            `compress`.
        dense: the dense model, which is not changed.
        calibration: at least two windows, of which every fourth is held out.
        n_steps: optimiser steps of each layer.
        batch_tokens: tokens of each step.
        learning_rate: the highest step of a weight, as a share of the root mean square
            of its tensor times the root of the layer's relative error: small errors
            need small steps.
        seed: seed of the order of the tokens.
        progress: called after each step with (done, total), over all layers.

    Returns:
        `pruned`. Its `heapr_distillation` is a table with a row for each layer: the
        relative squared error of the experts' output on held-out tokens `before` and
        `after`, and the `way` from the old weights (0) to the trained ones (1).

    Raises:
        SpecError: `pruned` was not made from `dense`, there is only one window, a
            number is not positive, or a mask, autocast or hook changes what `dense`
            computes.

    Example:
        >>> smaller = compress(model, calibration, ratio=0.4)  # doctest: +SKIP
        >>> distill_layers(smaller, model, calibration)  # doctest: +SKIP
    """
    numbers = {
        "n_steps": n_steps, "batch_tokens": batch_tokens, "learning_rate": learning_rate
    }  # fmt: skip
    for name, number in numbers.items():
        if number <= 0:
            raise SpecError(f"{name} must be positive, got {number}")
    parts = Parts(n_steps * len(sliced_experts(pruned)), progress)
    rows = []
    for lesson in lessons(pruned, dense, calibration):
        trained = _trainable(lesson.student)
        error = _error(trained, lesson.held_out)
        batches = _batches(len(lesson.fit.output), batch_tokens, n_steps, seed)
        rate = learning_rate * error**0.5
        _train(trained, lesson.fit, batches, rate, n_steps, parts)
        parts.end(n_steps)
        row = _taken(lesson.student, trained, lesson.held_out, error)
        rows.append({"layer": lesson.layer.layer, **row})
    note_change(
        pruned,
        f"each layer's experts distilled from the dense ones in {n_steps} steps of "
        f"{batch_tokens} tokens of {calibration.n_sequences} windows of "
        f"{calibration.label}",
    )
    pruned.__dict__["heapr_distillation"] = pd.DataFrame(rows)
    return pruned


def _trainable(student: RaggedExperts) -> RaggedExperts:
    """A copy whose own weights, in at least float32, require gradients."""
    twin = copy.deepcopy(student)
    for parameter in twin.parameters():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        parameter.data = parameter.data.to(wide)
        parameter.requires_grad_(False)
    for parameter in twin.parameters(recurse=False):
        parameter.requires_grad_(True)
    return twin


def _batches(
    n_tokens: int, size: int, n_steps: int, seed: int
) -> Iterator[torch.Tensor]:
    """Indices of the tokens of each step: every token once before any is twice."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.long)
    for _ in range(n_steps):
        while len(left) < size:
            left = torch.cat([left, torch.randperm(n_tokens, generator=generator)])
        yield left[:size]
        left = left[size:]


def _train(
    module: RaggedExperts,
    calls: ExpertCalls,
    batches: Iterator[torch.Tensor],
    learning_rate: float,
    n_steps: int,
    progress: Progress,
) -> None:
    """Minimise the squared error of `module` on `calls`."""
    weights = [p for p in module.parameters(recurse=False) if p.numel()]
    if not weights:
        return
    groups: Any = [
        {"params": [p], "lr": learning_rate * float(p.detach().square().mean().sqrt())}
        for p in weights
    ]
    optimiser = torch.optim.Adam(groups)
    warm = max(1, round(_WARM_UP * n_steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: min((step + 1) / warm, (n_steps - step) / max(1, n_steps - warm)),
    )
    with torch.inference_mode(False), torch.enable_grad():
        for step, tokens in enumerate(batches):
            optimiser.zero_grad()
            missing, size = _squares(module, calls.of(tokens))
            (missing / size).backward()
            optimiser.step()
            schedule.step()
            progress(step + 1, n_steps)


def _squares(
    module: RaggedExperts, calls: ExpertCalls
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ of squared errors, and of the squares of the output."""
    wide = torch.promote_types(calls.output.dtype, torch.float32)
    x, p, wanted = (
        part.to(wide)
        for part in (calls.hidden_states, calls.top_k_weights, calls.output)
    )
    missing = module(x, calls.top_k_index, p) - wanted
    return missing.square().sum(), wanted.square().sum().clamp_min(1e-30)


@torch.no_grad()
def _error(module: RaggedExperts, calls: ExpertCalls) -> float:
    """Squared error relative to the output."""
    found = [_squares(module, some) for some in calls.batches()]
    missing, squares = (sum(map(float, own)) for own in zip(*found, strict=True))
    return missing / squares


def _taken(
    student: RaggedExperts, trained: RaggedExperts, calls: ExpertCalls, error: float
) -> dict[str, float]:
    """Move `student` as far to `trained` as is best on `calls`; a row of the report.

    `error` is its error without moving.
    """
    errors = {0.0: error}
    for way in _WAYS:
        between = _trainable(student)
        _go(between, trained, way)
        errors[way] = _error(between, calls)
    best = min(errors, key=lambda way: errors[way])
    _go(student, trained, best)
    return {"before": error, "after": errors[best], "way": best}


@torch.no_grad()
def _go(module: RaggedExperts, trained: RaggedExperts, way: float) -> None:
    """Move weights to those that are `trained`, and round them to their dtype."""
    pairs = zip(
        module.parameters(recurse=False),
        trained.parameters(recurse=False),
        strict=True,
    )
    for own, new in pairs:
        own.copy_(own.to(new.dtype).lerp(new, way))
