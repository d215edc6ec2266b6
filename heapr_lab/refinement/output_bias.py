"""An output bias for each expert, for the mean of what was removed.

What pruning takes from an expert's output has a mean, which a bias restores:

    min  Σ_t ‖y_t − Σ_e p_te (E'_e(x_t) + b_e)‖²        B = (PᵀP + λ S²)⁻¹ Pᵀ R

with the dense experts' output y, the routing weights P (0 where a token is not routed
to an expert), the residuals R without biases, and S² the diagonal of PᵀP. All experts
of a layer are solved together. Three of every four windows are fitted to, the ridge λ
is the one of least error on the others, and a layer has no bias where none is smaller.

Configurations of most families have no such bias, so that only checkpoints in our own
format can have it. A factor on p for each expert would be a factor on its W_down, which
compensation fits already.

Source: this project; mean replacement as in Molchanov et al. 2017 and others.

Shapes: T tokens, E n_experts, D d_expert.
"""

from typing import Any

import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.experts import trainable_experts
from heapr_lab.models.ragged_experts import RaggedExperts, normalises
from heapr_lab.progress import Progress
from heapr_lab.refinement.expert_calls import ExpertCalls
from heapr_lab.refinement.students import lessons, note_change
from heapr_lab.text.calibration import CalibrationSet

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridges relative to the sum of squared routing weights of each expert."""


@torch.no_grad()
def add_output_bias(
    pruned: nn.Module,
    dense: nn.Module,
    calibration: CalibrationSet,
    *,
    progress: Progress | None = None,
) -> nn.Module:
    """Give the experts of `pruned` an output bias, in place.

    The cost is one forward pass of the dense model, and one of the kept experts.

    Args:
        pruned: the pruned model, made from `dense` by `prune`, `compensate` or
            `compress`, of any structure but uniform.
        dense: the dense model, which is not changed.
        calibration: at least two windows, of which every fourth is held out.
        progress: called with (decoder layers done, decoder layers in all).

    Returns:
        `pruned`. Its `heapr_output_bias` is a table with a row for each layer: the
        relative squared error of the experts' output on held-out tokens `before` and
        `after`, and the `ridge`, missing where the layer has no new bias.

    Raises:
        SpecError: `pruned` was not made from `dense`, was loaded from a checkpoint, is
            to be a stock checkpoint, or normalises the output of each expert; there is
            only one window; or a mask, autocast or hook changes what `dense` computes.

    Example:
        >>> smaller = compress(model, calibration, ratio=0.4)  # doctest: +SKIP
        >>> add_output_bias(smaller, model, calibration)  # doctest: +SKIP
    """
    _refuse(pruned, trainable_experts(pruned))
    rows = []
    for lesson in lessons(pruned, dense, calibration, progress=progress):
        layer, student = lesson.layer, lesson.student
        sums = (_sums(student, calls) for calls in (lesson.fit, lesson.held_out))
        row, bias = _solved(student, *sums)
        if student.down_bias is None:
            student.down_bias = nn.Parameter(torch.zeros_like(bias).to(layer.dtype))
        student.down_bias.add_(bias.to(student.down_bias))
        rows.append({"layer": layer.layer, **row})
    note_change(
        pruned,
        "an output bias for each expert, by least squares on "
        f"{calibration.n_sequences} windows of {calibration.label}",
    )
    pruned.__dict__["heapr_output_bias"] = pd.DataFrame(rows)
    return pruned


def _refuse(pruned: Any, students: dict[str, RaggedExperts]) -> None:
    """Check that the experts can have a bias.

    Raises:
        SpecError: they cannot.
    """
    normed = [n for n, own in students.items() if normalises(own.family)]
    if normed:
        raise SpecError(
            f"{normed[0]} normalises each expert's output, so a bias is not fitted by "
            "least squares: leave it out"
        )
    if getattr(pruned, "hf_quantizer", None) is not None:
        raise SpecError(
            f"this {type(pruned).__name__} was loaded from a pruned checkpoint, or "
            "saved as one: give a model as heapr_lab.prune, compensate or compress "
            "returned it"
        )
    keep = getattr(pruned, "heapr_keep", None)
    stock = keep is not None and keep.settings.get("structure") == "uniform"
    if stock and not all(own.family.has_bias for own in students.values()):
        raise SpecError(
            f"the experts of a stock {type(pruned).__name__} have no output bias: "
            "choose another structure than uniform"
        )


def _sums(
    student: RaggedExperts, calls: ExpertCalls
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """PᵀP (E, E), PᵀR (E, D), Σ of squared residuals and of squared outputs."""
    n_experts = len(student.heapr_widths)
    size: Any = {"dtype": torch.float64, "device": calls.output.device}
    gram = torch.zeros(n_experts, n_experts, **size)
    wanted = torch.zeros(n_experts, student.d_expert, **size)
    missing = total = 0.0
    for some in calls.batches():
        x, p = some.hidden_states, some.top_k_weights
        out = student(x, some.top_k_index, p)
        residual = some.output.double() - out.double()
        shares = torch.zeros(len(x), n_experts, **size)
        shares.scatter_add_(1, some.top_k_index, p.double())
        gram += shares.T @ shares
        wanted += shares.T @ residual
        missing += float(residual.square().sum())
        total += float(some.output.double().square().sum())
    return gram, wanted, missing, total


def _solved(
    student: RaggedExperts,
    fit: tuple[torch.Tensor, torch.Tensor, float, float],
    held_out: tuple[torch.Tensor, torch.Tensor, float, float],
) -> tuple[dict[str, Any], torch.Tensor]:
    """The row of the report, and the bias (E, D) fitted to all tokens."""
    gram, wanted, missing, total = held_out
    total = max(total, 1e-300)

    def error(bias: torch.Tensor) -> float:
        change = (bias * (gram @ bias - 2 * wanted)).sum()
        return (missing + float(change)) / total

    errors = {ridge: error(_bias(fit[0], fit[1], ridge)) for ridge in RIDGES}
    best = min(errors, key=lambda ridge: errors[ridge])
    before = missing / total
    if errors[best] >= before:
        row = {"before": before, "after": before, "ridge": float("nan")}
        return row, wanted.new_zeros(len(student.heapr_widths), student.d_expert)
    bias = _bias(fit[0] + gram, fit[1] + wanted, best)
    return {"before": before, "after": errors[best], "ridge": best}, bias


def _bias(gram: torch.Tensor, wanted: torch.Tensor, ridge: float) -> torch.Tensor:
    """(PᵀP + λ S²)⁻¹ PᵀR; 0 for experts without tokens."""
    own = gram.diagonal()
    lifted = gram + torch.diag(torch.where(own > 0, ridge * own, 1.0))
    found: torch.Tensor = torch.linalg.solve(lifted, wanted)
    return found
