"""Prune in the best of several ways, judged by loss on held-out calibration windows.

No single score is the best on every model: what wins where routers are balanced loses
where they are not. So a small portfolio of candidates (scores, with weights compensated
in several ways) is fitted to three of every four calibration windows and judged on the
others. HEAPr as published is always among them. The best is fitted again to all
windows, is compared once more with HEAPr, and the better of the two is returned: on
the held-out windows the result is never worse than the paper's.

Costs are counted in forward passes over all calibration windows; a backward pass counts
as two.

Source: this project.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.progress import Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.surgery import ReplacedDownProj, prune
from heapr_lab.refinement.candidates import CANDIDATES, PAPER, Candidate, usable
from heapr_lab.refinement.compensation import Compensation, describe_weights
from heapr_lab.refinement.portfolio import Portfolio, Trial
from heapr_lab.repr_html import card_html
from heapr_lab.text.calibration import CalibrationSet


@dataclass(frozen=True, eq=False, repr=False)
class FittedCompression:
    """The kept atoms, the weights that make up for the others, and how they came."""

    candidate: Candidate
    """The one that was chosen."""
    keep: KeepMask
    compensation: Compensation | None
    """The new weights; None for weights that are unchanged."""
    report: pd.DataFrame
    """One row for each candidate: `candidate`, `fitted_to` ("fit": three of four
    windows, "all"), `nll` on the held-out windows and `delta_nll` to the dense model
    [nats per token], `against_paper` (difference to HEAPr in the same row group) and
    its standard error over windows `stderr`, `seconds`, and whether it is `chosen`."""
    passes: float
    """Forward passes over the calibration windows that it took."""

    @property
    def downs(self) -> ReplacedDownProj | None:
        """The new W_down by layer, as `masking` and `prune` take it."""
        return None if self.compensation is None else self.compensation.downs

    def _facts(self) -> dict[str, str]:
        judged = self.report[self.report["fitted_to"].eq("all")]
        paper, own = (
            judged.loc[judged["candidate"].eq(name), "delta_nll"].iloc[0]
            for name in (PAPER.name, self.candidate.name)
        )
        return {
            "chosen": self.candidate.name,
            "pruning ratio": f"{self.keep.achieved_ratio:.4g}",
            "Δ nll on held-out windows, HEAPr → chosen": f"{paper:.4f} → {own:.4f}",
            "forward passes": f"{self.passes:.3g}",
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
    candidates: Sequence[Candidate] = CANDIDATES,
    quick: bool = False,
    time_budget: float | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> nn.Module:
    """The best pruned model that the candidates give, never worse than HEAPr's.

    "Never worse" is by loss on the held-out calibration windows. With the default
    candidates it takes fewer than 10 forward passes over the calibration windows,
    where the sums of all layers fit into memory.

    Args:
        model: the dense model, which is not changed.
        calibration: windows of the text that matters, at least two.
        selection: how many atoms, of what, in which structure; its estimator is chosen
            among the candidates.
        candidates: what is tried besides HEAPr as published.
        quick: try one candidate, the first one.
        time_budget: seconds after which no further candidate is begun; HEAPr and the
            first one are always tried.
        progress: called with (windows done, windows in all).
        **fields: the fields of `Selection`, in its place, such as `ratio=0.4`.

    Returns:
        The pruned model, as `prune` makes it. `heapr_report` is the report of
        `FittedCompression`.

    Raises:
        SpecError: there is only one window, the selection is infeasible, a candidate
            cannot be used, or an active mask, autocast or hook changes what `model`
            computes.
        LayoutError: weights are offloaded, or not finite.

    Example:
        >>> smaller = compress(model, calibration, ratio=0.4)  # doctest: +SKIP
        >>> smaller.heapr_report  # doctest: +SKIP
    """
    found = fit_compression(
        model,
        calibration,
        selection,
        candidates=candidates,
        quick=quick,
        time_budget=time_budget,
        progress=progress,
        **fields,
    )
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
    candidates: Sequence[Candidate] = CANDIDATES,
    quick: bool = False,
    time_budget: float | None = None,
    portfolio: Portfolio | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    **fields: Any,
) -> FittedCompression:
    """The mask and the weights alone, to evaluate with `masking(model, keep, downs)`.

    Arguments are those of `compress`, besides:

    Args:
        model: the dense model.
        calibration: the windows.
        selection: how many atoms, of what, in which structure.
        candidates: what is tried besides HEAPr as published.
        quick: try one candidate.
        time_budget: seconds.
        portfolio: statistics and sums of earlier calls for the same model and windows.
        progress: called with (windows done, windows in all).
        clock: returns the current time in seconds.
        **fields: the fields of `Selection`, in its place.

    Raises:
        SpecError: as `compress`.
    """
    refuse_disturbed(model, remedy="begin again with the dense model")
    selection = selection or Selection(**fields)
    portfolio = portfolio or Portfolio(model, calibration)
    tried = usable(candidates, across=portfolio.across)
    if len(tried) < 2:
        raise SpecError(
            "no candidate besides HEAPr as published can be used for this model; give "
            "some that compensate within each expert"
        )
    tried = tried[:2] if quick else tried
    with portfolio.counted(len(tried) + 3, progress) as count:
        trials = _tried(portfolio, selection, tried, clock=clock, budget=time_budget)
        best = min(trials, key=lambda c: trials[c].nll)
        ends = dict.fromkeys((PAPER, best))
        again = {c: portfolio.trial(c, selection, windows="all") for c in ends}
        dense = portfolio.dense
    winner = min(again, key=lambda c: again[c].nll)
    keep, compensation = again[winner].keep, again[winner].compensation
    keep = KeepMask(keep.arrays, {**keep.settings, "candidate": winner.name})
    report = _report(dense, {"fit": trials, "all": again}, winner)
    return FittedCompression(winner, keep, compensation, report, count.passes)


def _tried(
    portfolio: Portfolio,
    selection: Selection,
    candidates: Sequence[Candidate],
    *,
    clock: Callable[[], float],
    budget: float | None,
) -> dict[Candidate, Trial]:
    """The trials of all candidates for which there is time, at least of two."""
    began, trials = clock(), {}
    for number, candidate in enumerate(candidates):
        if number >= 2 and budget is not None and clock() - began > budget:
            break
        found = portfolio.trial(candidate, selection, windows="fit")
        trials[candidate] = replace(found, compensation=None)  # fitted again if chosen
    return trials


def _report(
    dense: torch.Tensor, groups: dict[str, dict[Candidate, Trial]], winner: Candidate
) -> pd.DataFrame:
    """The rows of `FittedCompression.report`."""
    rows = []
    for windows, trials in groups.items():
        for candidate, trial in trials.items():
            against = trial.losses - trials[PAPER].losses
            n = len(against)
            rows.append(
                {
                    "candidate": candidate.name,
                    "fitted_to": windows,
                    "nll": trial.nll,
                    "delta_nll": float((trial.losses - dense).mean()),
                    "against_paper": float(against.mean()),
                    "stderr": float(against.std() / n**0.5) if n > 1 else float("nan"),
                    "seconds": trial.seconds,
                    "chosen": windows == "all" and candidate == winner,
                }
            )
    return pd.DataFrame(rows)
