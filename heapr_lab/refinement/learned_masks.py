"""Learned masks: weights are frozen, and each atom has a soft gate.

Atom k has a logit z_k and the gate sigmoid((z_k - t) / T). At every step the threshold
t is the number at which the gates sum to the number of kept atoms, so the budget always
holds; the gradient goes through t, which removes its component common to all gates. The
temperature T decreases until gates are 0 or 1. Nothing is sampled. The loss is
KL(dense || gated), which needs no labels.

Logits are initialised as ranks: an atom's position in the order of scores, counted from
the threshold and as a share of all atoms. They do not depend on the scale of the score;
temperature and learning rate are shares of the atoms too.

Shapes: n_atoms of all layers in the order of the table; n windows, L tokens in each.
Source: after deterministic differentiable pruning, arXiv 2603.08065.
"""

import math

import numpy as np
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import masked
from heapr_lab.models.modes import differentiating, evaluating
from heapr_lab.models.streamed import refuse_streamed
from heapr_lab.progress import Progress, no_report
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import check_table, masking
from heapr_lab.refinement.distillation import Teacher, check_positive
from heapr_lab.text.calibration import CalibrationSet

_TEMPERATURES = 0.03, 0.005
"""First and last, as shares of the atoms; a share of 4 T has partly open gates."""
_BISECTIONS = 64
_LEAST_SLOPE = 1e-6
_EPS = 1e-20
"""Adam's, far below a gate's gradient, which decreases with the number of atoms."""


def learn_mask(
    model: nn.Module,
    table: ImportanceTable,
    calibration: CalibrationSet,
    *,
    ratio: float,
    estimator: str = "fisher",
    n_steps: int = 200,
    batch_size: int = 8,
    learning_rate: float = 0.01,
    seed: int = 0,
    progress: Progress | None = None,
) -> KeepMask:
    """The mask of gates that are trained under the budget of `ratio`.

    Exactly ⌊ratio · n⌋ atoms of all layers together are pruned, one by one, as `select`
    does with the scope "global" and the structure "ragged". The mask that training
    began with and the one it ended with are both measured on the calibration windows,
    and the better one is returned; `settings["learned"]` has both numbers and all that
    determined the result. Weights are not changed. An atom whose rank is far from the
    threshold hardly moves: its gate is closed, or open, before its gradient matters.

    Args:
        model: the dense model.
        table: its importance table.
        calibration: the windows to train on, and no others.
        ratio: share of the atoms to prune, in [0, 1).
        estimator: the gates are initialised with the ranks of its scores.
        n_steps: optimiser steps.
        batch_size: windows of each step.
        learning_rate: Adam's; a step moves a rank by about this share of the atoms.
        seed: seed of the order of the windows.
        progress: called after each step.

    Raises:
        SpecError: the model is streamed, a number is not positive, the ratio removes no
            atom, the table is of another model, or an active mask, autocast or hook
            changes what `model` computes.
        LayoutError: the model's experts cannot be masked exactly.
    """
    check_positive(n_steps=n_steps, batch_size=batch_size, learning_rate=learning_rate)
    refuse_streamed(model, remedy="load it with stream=False to train gates")
    layers = find_experts(model)
    check_table(model, layers, table)
    start = select(table, ratio=ratio, estimator=estimator)
    if not start.n_removed:
        raise SpecError(
            f"pruning ratio {ratio:g} of {start.n_atoms} atoms removes none, so there "
            "is nothing to learn; give a larger ratio"
        )
    teacher = Teacher(model, calibration.ids, batch_size)
    logits = _start_logits(table, estimator, start.n_removed).to(layers[0].device)
    with differentiating(model):
        _train(
            logits.requires_grad_(),
            layers,
            teacher,
            n_kept=start.n_kept,
            batches=_batches(calibration.n_sequences, batch_size, n_steps, seed),
            learning_rate=learning_rate,
            progress=progress or no_report,
        )
    learned = _cut(logits.detach().cpu(), start)
    kl = {
        name: _calibration_kl(teacher, keep, batch_size)
        for name, keep in {"start": start, "learned": learned}.items()
    }
    settings = {
        "calibration": calibration.fingerprint,
        "n_steps": n_steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "temperatures": list(_TEMPERATURES),
        "seed": seed,
        "calibration_kl": kl,
    }
    better = learned if kl["learned"] < kl["start"] else start
    return KeepMask(better.arrays, {**start.settings, "learned": settings})


def soft_gates(
    logits: torch.Tensor, n_kept: int, *, temperature: float
) -> torch.Tensor:
    """Gates that sum to `n_kept`; their gradient preserves the sum.

    Shapes: logits (n_atoms,), float64; result (n_atoms,), in [0, 1].

    Args:
        logits: the trained logits.
        n_kept: the budget, from 1 to n_atoms - 1.
        temperature: in the unit of the logits.
    """
    with torch.no_grad():
        threshold = _threshold(logits, n_kept, temperature)
        gates = torch.sigmoid((logits - threshold) / temperature)
        # 0 where every gate is 0 or 1: there the threshold is not unique, and constant.
        slope = (gates * (1 - gates)).sum().clamp(min=_LEAST_SLOPE)
    # A Newton step at the root: it does not move it, but has the root's derivative,
    # dt/dz_k = s_k / Σ s with s = gate · (1 - gate).
    excess = torch.sigmoid((logits - threshold) / temperature).sum() - n_kept
    threshold = threshold + temperature * excess / slope
    return torch.sigmoid((logits - threshold) / temperature)


def _threshold(logits: torch.Tensor, n_kept: int, temperature: float) -> torch.Tensor:
    """Where the gates sum to `n_kept`, by bisection: the sum decreases with it."""
    margin = temperature * (math.log(len(logits)) + 1)
    low, high = logits.min() - margin, logits.max() + margin
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        above = torch.sigmoid((logits - middle) / temperature).sum() > n_kept
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _start_logits(
    table: ImportanceTable, estimator: str, n_removed: int
) -> torch.Tensor:
    """Ranks of the scores as logits, (n_atoms,): below 0 for atoms to be pruned."""
    order = np.argsort(table.score(estimator).to_numpy(), kind="stable")
    logits = np.empty(len(order))
    logits[order] = (np.arange(len(order)) + 0.5 - n_removed) / len(order)
    return torch.from_numpy(logits)


def _train(
    logits: torch.Tensor,
    layers: list[ExpertsLayer],
    teacher: Teacher,
    *,
    n_kept: int,
    batches: list[torch.Tensor],
    learning_rate: float,
    progress: Progress,
) -> None:
    """Train `logits` in place, a step for each of `batches`."""
    optimizer = torch.optim.Adam([logits], lr=learning_rate, eps=_EPS)
    first, last = _TEMPERATURES
    for step, windows in enumerate(batches):
        temperature = first * (last / first) ** (step / max(1, len(batches) - 1))
        gates = soft_gates(logits, n_kept, temperature=temperature)
        with masked(layers, _by_layer(gates, layers)):
            loss = teacher.mean_kl(teacher.model, windows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress(step + 1, len(batches))


def _by_layer(values: torch.Tensor, layers: list[ExpertsLayer]) -> list[torch.Tensor]:
    """The `values` (n_atoms,) by layer, each (n_experts, d_inter)."""
    shapes = [(layer.n_experts, layer.d_inter) for layer in layers]
    parts = values.split([n_experts * d_inter for n_experts, d_inter in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _batches(
    n_windows: int, batch_size: int, n_steps: int, seed: int
) -> list[torch.Tensor]:
    """Indices of windows for each step: all windows in random order, repeatedly."""
    generator = torch.Generator().manual_seed(seed)
    wanted = n_steps * batch_size
    rounds = [
        torch.randperm(n_windows, generator=generator)
        for _ in range(math.ceil(wanted / n_windows))
    ]
    return list(torch.cat(rounds)[:wanted].split(batch_size))


def _cut(logits: torch.Tensor, start: KeepMask) -> KeepMask:
    """The mask without the lowest logits, as many as `start` prunes; ties in order."""
    kept = np.ones(start.n_atoms, dtype=bool)
    kept[np.argsort(logits.numpy(), kind="stable")[: start.n_removed]] = False
    return KeepMask.from_rows(start, kept)


def _calibration_kl(teacher: Teacher, keep: KeepMask, batch_size: int) -> float:
    """Mean KL(dense || masked) per predicted token of all windows, in nats."""
    total = 0.0
    with evaluating(teacher.model), masking(teacher.model, keep):
        for windows in torch.arange(len(teacher.ids)).split(batch_size):
            total += teacher.mean_kl(teacher.model, windows).item() * len(windows)
    return total / len(teacher.ids)
