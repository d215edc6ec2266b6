"""Compensate pruned atoms by least squares: a new W_down in closed form.

Removing atoms R leaves the columns K of W_down. The W' on K that minimises the squared
error of the layer's output over the calibration tokens is

    min ‖Φ_K W'ᵀ − Φ Wᵀ‖² + λ ‖(W' − W_K) S‖²,   C = Φᵀ Φ,   S² = diagonal of C_KK
    W'_K = W_K + W_R C_RK (C_KK + λ S²)⁻¹

with features Φ that are routing weight times activation (`activation_grams`). The
ridge λ pulls towards the original weights, so no sum of squares over the calibration
tokens ever increases. It is relative to each feature's own products: an atom, or an
expert, with a small load is not pulled more than others, but for an expert with fewer
tokens than atoms. It is chosen on tokens held out from the fit. Where no ridge has a
smaller error on them than the original weights, these are kept. Squared errors count a
token by the energy of its output, which in a layer of massive activations is that of a
few tokens, and not what they do to the loss: so the loss has the last word.

Source: least-squares reconstruction as in OBS (Hassibi & Stork 1993) and CORP-like
structured pruning, with HEAPr's atoms (its appendix leaves this to future work).

Shapes: E n_experts, I d_inter, D d_expert, F features of a problem: I, or E · I.
"""

import contextlib
import functools
import itertools
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.progress import Parts, Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import keeps_of, masking, prune
from heapr_lab.refinement.activation_grams import (
    FIT,
    HELD_OUT,
    ByLayer,
    LayerGrams,
    by_layer,
    checked_span,
    iter_grams,
    layer_store,
)
from heapr_lab.refinement.normal_equations import Columns, Normal, in_turn, scarcity
from heapr_lab.text.calibration import CalibrationSet

logger = logging.getLogger(__name__)

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""The ridges tried, relative to each feature's own products."""
Edited = contextlib.AbstractContextManager[nn.Module]
"""A context in which a model has other weights."""
Losses = tuple[float, ...]
"""The loss of each window, in nats per token."""
STANDARD_ERRORS = 2.0
"""By how many of them a paired difference of losses decides."""
_FEWEST_TO_JUDGE = 4
"""Held-out windows below which their standard error says too little."""


@dataclass(frozen=True, eq=False, repr=False)
class Compensation:
    """New columns of W_down for one mask."""

    down_projs: Mapping[int, torch.Tensor]
    """W_down by layer, (E, D, I), 0 for pruned atoms, in the model's dtype."""
    report: pd.DataFrame
    """A row for each layer: ridge, whether it was `changed` (not where no ridge has a
    smaller error on held-out tokens than the original weights), `dropped` and
    `compensated` (relative squared error of the output on these, without and with
    compensation), `untouched` experts, and the number of `singular` solves, for which
    Cholesky failed."""
    settings: dict[str, Any]
    """The settings that determine it beside model, mask and text, as plain data."""


def compensate(
    model: nn.Module,
    keep: KeepMask,
    calibration: CalibrationSet,
    *,
    ridge: float | None = None,
    span: str | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Prune `model` and compensate the pruned atoms by least squares.

    Args:
        model: the dense model, which is not changed.
        keep: the kept atoms.
        calibration: the windows whose activations are fitted.
        ridge: relative to each feature's own products; by default chosen for each
            layer on held-out tokens.
        span: "expert" compensates within each expert; with "layer" the experts of a
            layer compensate each other, where a token is routed to both. By default
            "layer" where a layer has at most 4096 atoms and the experts' outputs are
            summed without a norm of their own.
        progress: called with (windows done, windows in all).

    Returns:
        The pruned model, as `prune` makes it. `heapr_report` has the errors, by layer.

    Raises:
        SpecError: `keep` is of another model, the ridge is negative, or the span is
            "layer" for experts with a norm on their output.
        LayoutError: weights are offloaded, or not finite.

    Example:
        >>> smaller = compensate(model, keep, calibration)  # doctest: +SKIP
    """
    compensation = fit_compensation(
        model, keep, calibration, ridge=ridge, span=span, progress=progress
    )
    pruned = prune(model, keep, down_projs=compensation.down_projs)
    pruned.__dict__["heapr_report"] = compensation.report
    pruned.__dict__["heapr_weights"] = describe_weights(compensation, calibration)
    return pruned


def describe_weights(fitted: Compensation, calibration: CalibrationSet) -> str:
    """The description of the changed weights in a manifest."""
    if not fitted.down_projs:
        return "sliced, otherwise unchanged: compensation raised the held-out loss"
    unchanged = fitted.report.loc[~fitted.report["changed"], "layer"].tolist()
    but = f", except in layers {', '.join(map(str, unchanged))}" if unchanged else ""
    n_windows = fitted.settings.get("windows", calibration.n_sequences)
    taken = fitted.settings.get("steps")
    steps = f", then moved by {taken} steps on a part of them" if taken else ""
    return (
        f"W_down compensated by least squares (span {fitted.settings['span']}) on "
        f"{n_windows} windows of {calibration.seq_len} tokens of "
        f"{calibration.label}{but}{steps}; all else sliced, otherwise unchanged"
    )


def fit_compensation(
    model: nn.Module,
    keep: KeepMask,
    calibration: CalibrationSet,
    *,
    ridge: float | None = None,
    span: str | None = None,
    progress: Progress | None = None,
) -> Compensation:
    """The new W_down alone, to evaluate with `masking(model, keep, down_projs)`.

    It costs one forward pass, and from 16 windows on two more over every fourth, which
    is held out: if the loss there is larger with the new weights than without by more
    than two standard errors, no weight is changed, and a warning is logged. A ridge
    that is given is not judged. `activation_grams.iter_grams` describes the case in
    which the sums of all layers together exceed 4 GiB.

    Arguments and errors are those of `compensate`.
    """
    layers = find_experts(model)
    keeps_of(layers, keep)  # checks, before the pass, that it is of this model
    span = checked_span(layers, span)
    store = layer_store(model, layers, span=None)
    n_windows, judges = calibration.n_sequences, calibration.split()[1]
    judged = ridge is None and judges.n_sequences >= _FEWEST_TO_JUDGE
    parts = Parts(n_windows + 2 * judged * judges.n_sequences, progress)
    progress = parts.part(n_windows)
    grams = iter_grams(model, calibration, span=span, progress=progress)
    compensation = compensation_of(
        itertools.starmap(LayerSolver, grams),
        keep,
        ridge=ridge,
        down_projs=by_layer(store, "down"),
    )
    if not judged:
        return compensation
    return _unless_worse(compensation, model, keep, judges, parts)


def _unless_worse(
    compensation: Compensation,
    model: nn.Module,
    keep: KeepMask,
    judges: CalibrationSet,
    parts: Parts,
) -> Compensation:
    """The compensation, or unchanged weights where the loss of `judges` is smaller."""
    edits = (masking(model, keep, new) for new in (None, compensation.down_projs))
    part = functools.partial(parts.part, judges.n_sequences)
    before, after = (losses_on(edit, judges, part()) for edit in edits)
    if not is_less(before, after):
        return compensation
    logger.warning(
        "on %d held-out windows compensation raises the loss from %.4g to %.4g: so "
        "the weights stay as they are: a few tokens may have nearly all energy of a "
        "layer, and the mask not what it comes from; try another mask, or `compress`",
        judges.n_sequences,
        statistics.fmean(before),
        statistics.fmean(after),
    )
    report = compensation.report
    report = report.assign(changed=False, compensated=report["dropped"])
    return Compensation({}, report, compensation.settings)


def losses_on(edited: Edited, windows: CalibrationSet, progress: Progress) -> Losses:
    """The losses of the model inside a context, window by window."""
    with edited as model:
        return evaluate_perplexity(model, windows.ids, progress=progress).windows


def is_less(losses: Losses, others: Losses) -> bool:
    """Whether a loss is smaller on the same windows, by two standard errors."""
    difference, error = paired_difference(losses, others)
    return difference < -STANDARD_ERRORS * error


def compensation_of(
    solvers: "Iterable[LayerSolver]",
    keep: KeepMask,
    *,
    ridge: float | None = None,
    down_projs: ByLayer | None = None,
) -> Compensation:
    """The compensation of a mask by the solvers of all layers.

    The new weights are put into `down_projs`, which is empty.

    Raises:
        SpecError: the ridge is negative.
    """
    if ridge is not None and not ridge >= 0:
        raise SpecError(f"ridge is {ridge}, expected a number >= 0, or None")
    down_projs = {} if down_projs is None else down_projs
    rows, span = [], ""
    for solver in solvers:
        number, span = solver.layer.layer, solver.grams.span
        kept = torch.from_numpy(keep.by_layer(number).copy())
        down_projs[number], row = solver.solve(kept, ridge)
        rows.append({"layer": number, **row})
        del solver  # before the next one is made
    return Compensation(down_projs, pd.DataFrame(rows), {"span": span, "ridge": ridge})


# --- one layer --------------------------------------------------------------------


class LayerSolver:
    """Least squares of one layer: what all masks have in common is computed once.

    Shapes: P problems of F features: one for each expert, or one of all experts.
    """

    @torch.no_grad()
    def __init__(self, layer: ExpertsLayer, grams: LayerGrams) -> None:
        self.layer, self.grams = layer, grams
        down = layer.down.detach()  # (E, D, I), in the model's own dtype
        together = grams.span == "layer"
        self.weight = down.movedim(0, 1).flatten(1)[None] if together else down
        sums = grams.sums[HELD_OUT]
        self.output = sum(
            float((W.to(C) @ C * W).sum()) for W, C in in_turn(sums, self.weight, sums)
        )
        scarce = scarcity(grams, layer.d_inter)[:, None].expand(-1, layer.d_inter)
        self.scarce = scarce.reshape(len(self.weight), -1)

    @torch.no_grad()
    def solve(
        self, kept: torch.Tensor, ridge: float | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The new W_down (E, D, I) for a mask (E, I), and its row of the report."""
        kept = kept.to(self.weight.device)
        tokens = self.grams.tokens.sum(0).to(kept.device)  # (E,)
        enough = tokens >= kept.sum(1)
        masks = [
            m.reshape(len(self.weight), -1) for m in (kept, kept & enough[:, None])
        ]
        parts = (self.weight, *self.grams.sums, *masks, self.scarce)
        problems = [
            _Problems.of(*some) for some in in_turn(self.grams.sums[FIT], *parts)
        ]
        chosen, errors = _best_ridge(problems, ridge)
        dropped = sum(float(batch.held_out.dropped.sum()) for batch in problems)
        # A ridge given by the caller is always used.
        changed = ridge is not None or errors < dropped
        if changed:
            solved = zip(*(batch.solved(chosen) for batch in problems), strict=True)
            new, failed = map(torch.cat, solved)
            singular = int(failed.sum())
        else:
            new, singular = self.weight * masks[0][:, None].to(self.weight), 0
        untouched = (~enough).nonzero()[:, 0].tolist()
        self._warn(chosen, bool(dropped) and not changed, singular, untouched)
        output = max(self.output, 1e-300)
        row = {
            "ridge": chosen,
            "changed": changed,
            "dropped": dropped / output,
            "compensated": (errors if changed else dropped) / output,
            "untouched": untouched,
            "singular": singular,
        }
        if self.grams.span == "layer":
            new = new[0].unflatten(1, (self.layer.n_experts, -1)).movedim(1, 0)
        return new.to(self.layer.device, self.layer.dtype), row

    def _warn(
        self, ridge: float, unchanged: bool, singular: int, untouched: list[int]
    ) -> None:
        names = ", ".join(map(str, untouched))
        warnings = {
            "on held-out tokens no ridge has a smaller error than the original W_down, "
            "which is kept; give more text": unchanged,
            f"{singular} of {len(self.weight)} solves are singular at ridge {ridge:g} "
            "and use the pseudo-inverse; give a larger ridge or more text": singular,
            f"experts {names} have fewer tokens than kept atoms and are not "
            "compensated; give more text": untouched,
        }
        for text in (text for text, holds in warnings.items() if holds):
            logger.warning("layer %d: %s", self.layer.layer, text)


@dataclass(frozen=True)
class _Problems:
    """Least squares of some experts, or of all experts of a layer together."""

    kept_weight: torch.Tensor
    """The original weight (P, D, F), 0 for pruned features."""
    free: Columns
    """Kept features whose columns may change."""
    scarce: torch.Tensor
    """The factor by which the ridge of each of them is raised, (P, f)."""
    lost: torch.Tensor | None
    """Pruned columns of the weight, (P, D, r), where X is a change for each of them."""
    fit: Normal
    held_out: Normal

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        fit: torch.Tensor,
        held_out: torch.Tensor,
        kept: torch.Tensor,
        free: torch.Tensor,
        scarce: torch.Tensor,
    ) -> "_Problems":
        """From weights (P, D, F), products (P, F, F), and masks and ridges (P, F)."""
        columns, gone = Columns.of(free), Columns.of(~kept)
        weight = weight.to(fit)
        lost = gone.of_weight(weight)
        of_lost = lost.mT @ lost
        few = gone.index.shape[1] < weight.shape[1]
        parts = []
        for products in (fit, held_out):
            wanted = columns.of_products(products, gone)  # (P, f, r)
            parts.append(
                Normal(
                    columns.of_products(products, columns),
                    wanted if few else wanted @ lost.mT,
                    (gone.of_products(products, gone) * of_lost).sum((1, 2)),
                    of_lost if few else None,
                )
            )
        rise = scarce.gather(1, columns.index)
        return cls(weight * kept[:, None], columns, rise, lost if few else None, *parts)

    def held_out_error(self, ridge: float) -> float:
        """Σ of squared errors on the held-out tokens, fitted to the others."""
        change, _ = self.fit.solve(ridge * self.scarce)
        return float(self.held_out.error(change).sum())

    def solved(self, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The new weight (P, D, F), fitted to all tokens; which were singular (P,)."""
        normal = self.fit + self.held_out
        change, singular = normal.solve(ridge * self.scarce)
        # Rounding errors of a singular solve must do no harm.
        worse = normal.error(change) > normal.dropped
        change = torch.where(worse[:, None, None], 0.0, change).mT  # (P, q, f)
        new = self.kept_weight.clone()
        self.free.put(change if self.lost is None else self.lost @ change, new)
        return new, singular


def _best_ridge(
    problems: Sequence[_Problems], ridge: float | None
) -> tuple[float, float]:
    """The ridge of least error on held-out tokens, and that error.

    The error falls towards the best ridge from both sides, but for noise: from a middle
    one, neighbours are tried while they are better.
    """
    tried = RIDGES if ridge is None else (ridge,)

    @functools.cache
    def error(at: int) -> float:
        return sum(batch.held_out_error(tried[at]) for batch in problems)

    best = len(tried) // 2
    while True:
        around = range(max(0, best - 1), min(len(tried), best + 2))
        candidate = min(around, key=error)
        if error(candidate) >= error(best):
            return tried[best], error(best)
        best = candidate
