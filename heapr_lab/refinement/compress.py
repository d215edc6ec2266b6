"""Eliminate and compensate, where held-out calibration windows are in favour of it.

Three of every four windows are fitted to: the scores, the sums of one more forward
pass, elimination within these sums, and the compensation of what it removes. The result
is compared with HEAPr as published, its mask with unchanged weights, on windows that
neither has seen; where the paired difference is not in favour by more than two standard
errors, HEAPr's mask is returned. So it is never worse than the paper's by more than
noise. What is reported is measured on further windows, which have no part in either.

Source: this project.
"""

import contextlib
import statistics
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from torch import nn

from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.progress import Parts, Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.surgery import ReplacedDownProj, masking, prune
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compensation import Compensation, describe_weights
from heapr_lab.repr_html import card_html
from heapr_lab.text.calibration import CalibrationSet

ESTIMATOR = "elimination"
"""The estimator whose mask is compensated."""
PAPER = "heapr"
"""The estimator of the mask that is returned where compensation is no better."""
COMPENSATED = f"{ESTIMATOR} + compensation"
_STANDARD_ERRORS = 2.0
"""By which a difference has to be in favour."""
Losses = tuple[float, ...]
"""Of each window, in nats per token."""


@dataclass(frozen=True, eq=False, repr=False)
class FittedCompression:
    """The kept atoms, the weights that make up for the others, and how they came."""

    keep: KeepMask
    compensation: Compensation | None
    """The new weights; None for weights that are unchanged."""
    report: pd.DataFrame
    """A row for "heapr" and for "elimination + compensation": `made`; the difference to
    HEAPr on the windows that decide, `deciding`, and its standard error
    `deciding_stderr`; on the windows that are reported `nll`, its difference to the
    dense model `delta_nll` and to HEAPr `against_paper`, with the standard error of the
    latter `stderr`, all in nats per token; and whether it is `chosen`."""

    @property
    def downs(self) -> ReplacedDownProj | None:
        """The new W_down by layer, as `masking` and `prune` take it."""
        return None if self.compensation is None else self.compensation.downs

    def _facts(self) -> dict[str, str]:
        rows = self.report.set_index("made")
        chosen = rows.index[rows["chosen"]][0]
        paper, ours = rows.loc[[PAPER, chosen], "delta_nll"]
        return {
            "chosen": str(chosen),
            "pruning ratio": f"{self.keep.achieved_ratio:.4g}",
            "Δ nll on held-out windows, HEAPr → chosen": f"{paper:.4f} → {ours:.4f}",
        }

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"FittedCompression({facts})"

    def _repr_html_(self) -> str:
        return card_html("Compression", self._facts())


def compress(
    model: nn.Module,
    calibration: CalibrationSet,
    selection: Selection | None = None,
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
        selection: how many atoms, of what, in which structure; its estimator is chosen.
        progress: called with (windows done, windows in all).
        **fields: the fields of `Selection`, in its place, such as `ratio=0.4`.

    Returns:
        The pruned model, as `prune` makes it. `heapr_report` is the report of
        `FittedCompression`.

    Raises:
        SpecError: there are fewer than 8 windows, the selection is infeasible, or an
            active mask, autocast or hook changes what `model` computes.
        LayoutError: weights are offloaded, or not finite.

    Example:
        >>> smaller = compress(model, calibration, ratio=0.4)  # doctest: +SKIP
        >>> smaller.heapr_report  # doctest: +SKIP
    """
    found = fit_compression(model, calibration, selection, progress=progress, **fields)
    pruned = prune(model, found.keep, downs=found.downs)
    pruned.__dict__["heapr_report"] = found.report
    if found.compensation is not None:
        said = describe_weights(found.compensation, calibration)
        pruned.__dict__["heapr_weights"] = said
    return pruned


def fit_compression(
    model: nn.Module,
    calibration: CalibrationSet,
    selection: Selection | None = None,
    *,
    fitted: CalibratedModel | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> FittedCompression:
    """The mask and the weights alone, to evaluate with `masking(model, keep, downs)`.

    Arguments are those of `compress`, besides:

    Args:
        model: the dense model.
        calibration: the windows.
        selection: how many atoms, of what, in which structure.
        fitted: the model on the first of `calibration.three_parts()`, of earlier calls.
        progress: called with (windows done, windows in all).
        **fields: the fields of `Selection`, in its place.

    Raises:
        SpecError: as `compress`.
    """
    refuse_disturbed(model, remedy="begin again with the dense model")
    selection = selection or Selection(**fields)
    fit, deciding, reported = calibration.three_parts()
    fitted = fitted or CalibratedModel(model, fit)
    n_fit = fitted.n_passes * fit.n_sequences
    n_judged = 2 * deciding.n_sequences + 3 * reported.n_sequences
    parts = Parts(n_fit + n_judged, progress)
    ours, made = fitted.compensated(
        replace(selection, estimator=ESTIMATOR, estimator_options=()), progress=parts
    )
    parts.end(n_fit)
    paper = fitted.keep(replace(selection, estimator=PAPER, estimator_options=()))
    edits = {PAPER: (paper, None), COMPENSATED: (ours, made.downs)}
    decided, seen = (
        {
            name: _losses(masking(model, *edit), windows, parts)
            for name, edit in edits.items()
        }
        for windows in (deciding, reported)
    )
    dense = _losses(contextlib.nullcontext(model), reported, parts)
    report = _report(decided, seen, dense)
    if report.loc[report["made"].eq(COMPENSATED), "chosen"].all():
        return FittedCompression(ours, made, report)
    return FittedCompression(paper, None, report)


def _losses(
    edited: contextlib.AbstractContextManager[nn.Module],
    windows: CalibrationSet,
    progress: Parts,
) -> Losses:
    with edited as model:
        found = evaluate_perplexity(model, windows.ids, progress=progress)
    progress.end(windows.n_sequences)
    return found.windows


def _report(
    decided: dict[str, Losses], seen: dict[str, Losses], dense: Losses
) -> pd.DataFrame:
    """The rows of `FittedCompression.report`, from the losses on both kinds of windows.

    Raises:
        SpecError: there are no windows.
    """
    rows: list[dict[str, Any]] = []
    for made, losses in seen.items():
        deciding, error = paired_difference(decided[made], decided[PAPER])
        against, stderr = paired_difference(losses, seen[PAPER])
        rows.append(
            {
                "made": made,
                "deciding": deciding,
                "deciding_stderr": error,
                "nll": statistics.fmean(losses),
                "delta_nll": paired_difference(losses, dense)[0],
                "against_paper": against,
                "stderr": stderr,
                "chosen": deciding < -_STANDARD_ERRORS * error,
            }
        )
    rows[0]["chosen"] = not rows[1]["chosen"]
    return pd.DataFrame(rows)
