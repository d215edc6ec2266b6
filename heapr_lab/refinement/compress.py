"""Compensate a mask by least squares, where held-out windows are in favour of it.

Three of every four windows are fitted to: the scores, the sums of one more forward
pass, two masks, the compensation of what each removes, and a few steps from the better
one towards the dense model's predictions. The masks are those of the
Fisher information, which lose less on pretrained weights, and those of elimination
within the sums, which lose less on models from scratch. HEAPr as published, its mask
with unchanged weights, gives way to the first and that to the second only where the
paired difference, over windows that no fit has seen, is in favour by more than two
standard errors. So it is worse than the paper's by no more than noise, which is
larger the fewer windows decide. The gain that is reported is measured on further
windows, which have no part in either. HEAPr's mask that is returned is of all windows,
as the paper's is, which leaves none to report.

Source: this project.
"""

import contextlib
import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.progress import Parts, Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection, selection_of
from heapr_lab.pruning.surgery import ReplacedDownProj, masking, prune
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compensation import (
    Compensation,
    Edited,
    Losses,
    describe_weights,
    is_less,
    losses_on,
)
from heapr_lab.refinement.descent import N_STEPS, descended, n_windows
from heapr_lab.text.calibration import CalibrationSet

COMPENSATED = {
    f"{estimator} + compensation": estimator for estimator in ("fisher", "elimination")
}
"""The estimators whose masks are compensated."""
STEPS = " + steps"
"""What is added to the name of one of them for the steps from there."""
PAPER = "heapr"
"""The estimator of the mask that is returned where compensation is no better."""
_DENSE = "dense"
_REPORTED = ("nll", "delta_nll", "against_paper", "stderr")


@dataclass(frozen=True, eq=False, repr=False)
class FittedCompression:
    """The kept atoms, the weights that make up for the others, and how they came."""

    keep: KeepMask
    compensation: Compensation | None = None
    """The new weights; None for weights that are unchanged."""
    report: pd.DataFrame | None = None
    """A row for "heapr", each of `COMPENSATED`, and, where a compensated mask is better
    and there is text enough, one with `STEPS`: `made`; the difference to HEAPr on the
    windows that decide, `deciding`, and its standard error `deciding_stderr`; whether
    it is `chosen`; and on the windows that are reported `nll`, its difference
    to the dense model `delta_nll` and to HEAPr `against_paper`, with the standard error
    of the latter `stderr`, all in nats per token. These four are measured of the chosen
    one and of HEAPr's mask of the fit, where another is chosen; else they are NaN. None
    where nothing was to choose."""

    @property
    def down_projs(self) -> ReplacedDownProj | None:
        """The new W_down by layer, as `masking` and `prune` take it."""
        return None if self.compensation is None else self.compensation.down_projs


def compress(
    model: nn.Module,
    calibration: CalibrationSet,
    selection: Selection | float | None = None,
    *,
    progress: Progress | None = None,
    **fields: Any,
) -> nn.Module:
    """The pruned and compensated model, or HEAPr's where it is no better.

    "Better" is by loss on calibration windows that neither was fitted to. It takes less
    than twice the time of the scores where solves take little of it.

    Args:
        model: the dense model, which is not changed.
        calibration: windows of the text that matters, at least 8.
        selection: how many atoms, of what, in which structure, or the ratio alone; the
            estimator is chosen.
        progress: called with (windows done, windows in all).
        **fields: the fields of `Selection`, in its place, such as `ratio=0.4`.

    Returns:
        The pruned model, as `prune` makes it. `heapr_report` is the report of
        `FittedCompression`.

    Raises:
        SpecError: fewer than 8 windows differ, the selection is infeasible, or an
            active mask, autocast or hook changes what `model` computes.
        LayoutError: weights are offloaded, or not finite.

    Example:
        >>> smaller = compress(model, calibration, ratio=0.4)  # doctest: +SKIP
        >>> smaller.heapr_report  # doctest: +SKIP
    """
    fitted = fit_compression(model, calibration, selection, progress=progress, **fields)
    pruned = prune(model, fitted.keep, down_projs=fitted.down_projs)
    pruned.__dict__["heapr_report"] = fitted.report
    if fitted.compensation is not None:
        text = describe_weights(fitted.compensation, calibration)
        pruned.__dict__["heapr_weights"] = text
    return pruned


def fit_compression(
    model: nn.Module,
    calibration: CalibrationSet,
    selection: Selection | float | None = None,
    *,
    fitted: CalibratedModel | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> FittedCompression:
    """The mask and the weights alone, to evaluate with `masking`.

    Arguments are those of `compress`, and:

    Args:
        model: the dense model.
        calibration: the windows.
        selection: how many atoms, of what, in which structure.
        fitted: the model on the first of `calibration.three_parts()`, of earlier calls.
        progress: called with (windows done, windows in all).
        **fields: the fields of `Selection`, in its place.

    Raises:
        SpecError: as `compress`, or `fitted` is of other windows.
    """
    refuse_disturbed(model, remedy="begin again with the dense model")
    selection = selection_of(selection, fields)
    fit, *judges = calibration.three_parts()
    fitted = _of_windows(fit, fitted or CalibratedModel(model, fit))
    first, *others = COMPENSATED.values()
    n_passes = fitted.n_passes(first, compensated=True)
    n_passes += 0 if fitted.at_once else len(others)
    n_fit, n_scored = fit.n_sequences, fitted.n_passes(PAPER) * fit.n_sequences
    n_deciding, n_reported = (windows.n_sequences for windows in judges)
    n_steps = 4 * n_windows(fit)  # forward passes, of which a backward pass is two
    n_decided = (1 + len(COMPENSATED) + (n_steps > 0)) * n_deciding
    n_last = 3 * n_reported
    parts = Parts(n_passes * n_fit + n_decided + n_steps + n_last, progress)
    decided: dict[str, Losses] = {}

    def favoured(name: str, edited: Edited) -> bool:
        """Whether the windows that decide favour it over all before."""
        decided[name] = losses_on(edited, judges[0], parts.part(n_deciding))
        return _chosen(decided) == name

    paper = fitted.keep(_of(selection, PAPER), parts.part(n_scored))
    favoured(PAPER, masking(model, paper))
    compensated: tuple[KeepMask, Compensation] | None = None
    for name, estimator in COMPENSATED.items():
        part = parts.part(fitted.n_passes(estimator, compensated=True) * n_fit)
        keep, columns = fitted.compensated(
            _of(selection, estimator), eliminate=estimator == first, progress=part
        )
        if favoured(name, masking(model, keep, columns.down_projs)):
            compensated = keep, columns
    if compensated is not None and n_steps:
        name, (keep, columns) = f"{_chosen(decided)}{STEPS}", compensated
        moved = descended(model, keep, columns.down_projs, fit, parts.part(n_steps))
        settings = columns.settings | {"steps": min(N_STEPS, n_windows(fit))}
        columns = replace(columns, down_projs=moved, settings=settings)
        if favoured(name, masking(model, keep, columns.down_projs)):
            compensated = keep, columns
    last = parts.part(n_last)
    if compensated is None:
        keep = fitted.keep_on_all(_of(selection, PAPER), judges, last)
        last(1, 1)  # where that was measured before, it needs no pass
        return FittedCompression(keep, None, _report(decided, {}))
    keep, columns = compensated
    edits: dict[str, Edited] = {
        PAPER: masking(model, paper),
        _chosen(decided): masking(model, keep, columns.down_projs),
        _DENSE: contextlib.nullcontext(model),
    }
    reported = _losses(edits, judges[1], last)
    return FittedCompression(keep, columns, _report(decided, reported))


def _of_windows(fit: CalibrationSet, fitted: CalibratedModel) -> CalibratedModel:
    """The model that is fitted to these windows, and so to none that decide.

    Raises:
        SpecError: it is fitted to others.
    """
    if fitted.windows.fingerprint != fit.fingerprint:
        raise SpecError(
            f"`fitted` is of {fitted.windows!r}, expected {fit!r}, the first of "
            "calibration.three_parts(): windows that decide are not fitted to"
        )
    return fitted


def _losses(
    edits: dict[str, Edited], windows: CalibrationSet, progress: Progress
) -> dict[str, Losses]:
    n = windows.n_sequences
    parts = Parts(len(edits) * n, progress)
    return {k: losses_on(edit, windows, parts.part(n)) for k, edit in edits.items()}


def _of(selection: Selection, estimator: str) -> Selection:
    return replace(selection, estimator=estimator, estimator_options=())


def _chosen(decided: dict[str, Losses]) -> str:
    """The name of the last way that the deciding windows favour over the one before.

    So `PAPER` stays where nothing is better by more than noise, and of two ways that
    are both better the first, unless the second is better than that as well.
    """
    best = PAPER
    for name, losses in decided.items():
        if is_less(losses, decided[best]):
            best = name
    return best


def _report(decided: dict[str, Losses], reported: dict[str, Losses]) -> pd.DataFrame:
    """The rows of `FittedCompression.report`.

    Raises:
        SpecError: there are no windows.
    """
    rows = []
    for name, losses in decided.items():
        difference, error = paired_difference(losses, decided[PAPER])
        row = {"made": name, "deciding": difference, "deciding_stderr": error}
        row |= {"chosen": name == _chosen(decided)} | dict.fromkeys(_REPORTED, math.nan)
        if name in reported:
            delta, _ = paired_difference(reported[name], reported[_DENSE])
            against = paired_difference(reported[name], reported[PAPER])
            values = statistics.fmean(reported[name]), delta, *against
            row |= dict(zip(_REPORTED, values, strict=True))
        rows.append(row)
    return pd.DataFrame(rows)
