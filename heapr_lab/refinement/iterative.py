"""Prune in rounds: part of the atoms are pruned, the rest are scored again, and so on.

The second-order scores are those of the dense model; when many atoms are pruned, the
importance of the others changes. Each round scores the model that the previous rounds
left, compensated if requested, and prunes up to its share of the ratio. Masks are
nested.
"""

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import find_experts
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.progress import Parts, Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection, exact_ratio
from heapr_lab.pruning.ranking import GONE
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import check_table, masking
from heapr_lab.refinement.activation_grams import (
    collect_grams,
    default_span,
    fits_in_memory,
)
from heapr_lab.refinement.compensation import (
    Compensation,
    fit_compensation,
    solve_layers,
)
from heapr_lab.repr_html import card_html
from heapr_lab.text.calibration import CalibrationSet


@dataclass(frozen=True, eq=False, repr=False)
class Rounds:
    """The result of pruning in rounds."""

    keep: KeepMask
    """The mask after the last round; `settings` has the number of rounds."""
    compensation: Compensation | None
    """The compensation for that mask, if requested."""
    history: pd.DataFrame
    """By round: achieved_ratio, and `passes` (forward and backward) so far."""

    def __repr__(self) -> str:
        return (
            f"Rounds({len(self.history)} rounds, pruning ratio "
            f"{self.keep.achieved_ratio:.4g}, "
            f"{'not ' if self.compensation is None else ''}compensated)"
        )

    def _repr_html_(self) -> str:
        rounds = enumerate(self.history.itertuples(), start=1)
        facts = {
            f"round {number}": f"{r.achieved_ratio:.2%} pruned, {r.passes} passes"
            for number, r in rounds
        }
        facts["compensated"] = "no" if self.compensation is None else "yes"
        return card_html("Pruning in rounds", facts)


def prune_in_rounds(
    model: nn.Module,
    calibration: CalibrationSet,
    selection: Selection | None = None,
    *,
    rounds: int = 4,
    compensated: bool = True,
    span: str | None = None,
    table: ImportanceTable | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> Rounds:
    """Prune in equal steps of the ratio, scoring the remaining atoms before each step.

    Costs a forward and backward pass for each round, and one forward pass for the
    compensation, whose sums are always those of the dense model; where they do not fit
    in memory together, or the model is streamed, a forward pass for each round.

    Args:
        model: the dense model, which is not changed.
        calibration: the windows to score and to compensate on.
        selection: how atoms are selected; its ratio is that of the last round.
        rounds: number of rounds; 1 is a single `select`.
        compensated: whether pruned atoms are compensated in every round.
        span: as in `compensation.compensate`.
        table: the dense model's statistics on `calibration`, if already measured.
        progress: called with (windows done, windows in all).
        **fields: the fields of `Selection`, in its place, as in `select`.

    Raises:
        SpecError: `rounds` is below 1, the selection is infeasible, or an active mask,
            autocast or hook changes what `model` computes.
    """
    if rounds < 1:
        raise SpecError(f"rounds is {rounds}, expected a whole number from 1")
    refuse_disturbed(model, remedy="begin again with the dense model")
    selection = selection or Selection(**fields)
    whole = exact_ratio(selection.ratio)
    layers = find_experts(model)
    if table is not None:
        check_table(model, layers, table)
    span = span or default_span(layers)
    at_once = fits_in_memory(layers, span) and backend_of(model).runs_whole
    n_solves = 0 if not compensated else 1 if at_once else rounds
    n_passes = rounds - (table is not None) + n_solves
    n_windows = calibration.n_sequences
    count = Parts(n_passes * n_windows, progress)
    grams = None
    if compensated and at_once:
        grams = collect_grams(model, calibration, span=span, progress=count)
        count.end(n_windows)
    keep: KeepMask | None = None
    found: Compensation | None = None
    rows = []
    for number in range(1, rounds + 1):
        if table is None or keep is not None:
            table = _scored(model, calibration, keep, found, progress=count)
            count.end(n_windows)
        part: Any = whole * number / rounds
        chosen = select(table, replace(selection, ratio=part))
        keep = chosen if keep is None else _within(chosen, keep)
        if grams is not None:
            found = solve_layers(layers, keep, grams)
        elif compensated:
            found = fit_compensation(
                model, keep, calibration, span=span, progress=count
            )
            count.end(n_windows)
        rows.append({"round": number, "achieved_ratio": keep.achieved_ratio})
    assert keep is not None
    keep = KeepMask(keep.arrays, {**keep.settings, "rounds": rounds})
    history = pd.DataFrame(rows).assign(passes=range(1, rounds + 1))
    return Rounds(keep, found, history)


def _within(chosen: KeepMask, before: KeepMask) -> KeepMask:
    """The atoms that both keep; `chosen` may keep others by protection or counts."""
    return KeepMask.from_rows(chosen, chosen.rows & before.rows, **chosen.settings)


def _scored(
    model: nn.Module,
    calibration: CalibrationSet,
    keep: KeepMask | None,
    found: Compensation | None,
    *,
    progress: Progress,
) -> ImportanceTable:
    """The statistics of the model pruned to `keep`; pruned atoms are marked."""
    if keep is None:
        return collect_statistics(model, calibration, progress=progress)
    with masking(model, keep, None if found is None else found.downs):
        measured = collect_statistics(model, calibration, progress=progress)
    frame = measured.frame
    frame[GONE] = ~keep.rows
    before = frame["w_down_sq"].to_numpy()
    norms = before * keep.rows
    if found is not None:
        squares = [found.downs[k].double().square().sum(1) for k in keep.layers]
        norms = torch.cat([layer.flatten().cpu() for layer in squares]).numpy()
    frame["w_down_sq"] = norms.astype(before.dtype)
    return ImportanceTable.from_frame(frame, **measured.metadata)
