"""What the candidates of `compress` are made of: statistics, sums, and held-out losses.

One portfolio serves any number of selections: only masks, solves and losses are new.
"""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from heapr_lab.evaluation.perplexity import window_nll
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.merging import merge_frames
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.progress import Parts, Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import ReplacedDownProj, masking
from heapr_lab.refinement.activation_grams import FIT, LayerGrams
from heapr_lab.refinement.candidates import Candidate
from heapr_lab.refinement.compensation import Compensation, compensation_of
from heapr_lab.refinement.elimination import COLUMNS, PRICES, with_elimination
from heapr_lab.refinement.layer_sums import LayerSums
from heapr_lab.storage.hashing import digest
from heapr_lab.text.calibration import CalibrationSet

_OF_STATISTICS = 3
"""Forward passes that a forward and a backward pass count as."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A candidate fitted to windows, and judged on the held-out ones."""

    keep: KeepMask
    compensation: Compensation | None
    losses: torch.Tensor
    """On each held-out window, (n_windows,) float64, in nats per token."""
    seconds: float

    @property
    def nll(self) -> float:
        """The mean loss, in nats per token."""
        return float(self.losses.mean())


class Count:
    """Windows that were run, as progress, and as forward passes over all windows."""

    def __init__(
        self, n_windows: int, expected: int, progress: Progress | None
    ) -> None:
        """Begin.

        Args:
            n_windows: number of calibration windows.
            expected: number of windows that will be run.
            progress: called with (windows done, windows in all).
        """
        self._n_windows = n_windows
        self._parts = Parts(expected, progress)
        self._size = 0  # of the current part
        self._cost = 0.0

    @property
    def passes(self) -> float:
        """Forward passes over all calibration windows so far."""
        return self._cost / self._n_windows

    def part(self, n_windows: int, *, cost: int = 1) -> Progress:
        """The progress of a part of so many windows, each of which costs `cost`."""
        self._parts.end(self._size)
        self._size = n_windows
        self._cost += cost * n_windows
        self._parts.total = max(self._parts.total, self._parts.done + n_windows)
        return self._parts


class Portfolio:
    """The statistics and sums of a model on calibration windows, computed when needed.

    Three of every four windows are for fitting ("fit"), the others for judging; "all"
    are both.
    """

    def __init__(
        self,
        model: nn.Module,
        calibration: CalibrationSet,
        *,
        measure: Callable[..., ImportanceTable] | None = None,
    ) -> None:
        """Nothing is run yet.

        Args:
            model: the dense model, which is not changed.
            calibration: at least two windows.
            measure: called with (windows, progress=…), returns the statistics on them,
                from a cache for example.

        Raises:
            SpecError: there is only one window, or no room for the sums of a streamed
                model.
            LayoutError: weights are offloaded, or not finite.
        """
        self.model, self.calibration = model, calibration
        self.fit, self.held_out = calibration.split()
        self._measure = measure or functools.partial(collect_statistics, model)
        self._count = self._new_count(0, None)
        self._eliminated: dict[tuple[str, tuple[str, ...]], ImportanceTable] = {}
        self.sums = LayerSums(
            model,
            find_experts(model),
            calibration,
            progress=self._part,
        )

    @property
    def across(self) -> bool:
        """Whether experts can compensate each other across a layer."""
        return self.sums.span == "layer"

    @contextlib.contextmanager
    def counted(self, n_trials: int, progress: Progress | None) -> Iterator[Count]:
        """Count what is run inside, for so many trials."""
        n_all, n_held = self.calibration.n_sequences, self.held_out.n_sequences
        fixed = 0 if "_tables" in self.__dict__ else 2 * n_all + n_held
        before = self._count
        self._count = self._new_count(fixed + n_trials * n_held, progress)
        try:
            yield self._count
        finally:
            self._count = before

    def _part(self, n_windows: int) -> Progress:
        return self._count.part(n_windows)

    def _new_count(self, expected: int, progress: Progress | None) -> Count:
        return Count(self.calibration.n_sequences, expected, progress)

    def trial(
        self, candidate: Candidate, selection: Selection, *, windows: str
    ) -> Trial:
        """Fit a candidate to the `windows`, "fit" or "all", and judge it.

        Raises:
            SpecError: the selection is infeasible.
        """
        began = time.perf_counter()
        keep, made = self.made(candidate, selection, windows=windows)
        losses = self.judged(keep, None if made is None else made.downs)
        return Trial(keep, made, losses, time.perf_counter() - began)

    def made(
        self, candidate: Candidate, selection: Selection, *, windows: str
    ) -> tuple[KeepMask, Compensation | None]:
        """The mask and the weights of a candidate fitted to the `windows`.

        Raises:
            SpecError: the selection is infeasible.
        """
        chosen = replace(selection, estimator=candidate.estimator)
        table = self.table(candidate.estimator, windows=windows)
        keep = select(table, chosen)
        if candidate.weights == "unchanged":
            return keep, None
        return keep, compensation_of(
            self.sums.solvers(candidate.weights),
            keep,
            fit_only=windows == "fit",
            downs=self.sums.new_downs(),
        )

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        """The dense model's loss on each held-out window, (n_windows,) float64."""
        return self._losses()

    def judged(self, keep: KeepMask, downs: ReplacedDownProj | None) -> torch.Tensor:
        """A pruned model's loss on each held-out window, (n_windows,) float64."""
        with masking(self.model, keep, downs):
            return self._losses()

    def _losses(self) -> torch.Tensor:
        progress = self._part(self.held_out.n_sequences)
        return window_nll(self.model, self.held_out.ids, progress=progress)

    def table(self, estimator: str, *, windows: str) -> ImportanceTable:
        """The statistics on the `windows`, with the scores of `estimator`."""
        if estimator not in PRICES:
            return self._tables[windows]
        # Within experts, one elimination serves all prices.
        prices = [PRICES[estimator]] if self.across else list(COLUMNS)
        key = windows, tuple(prices)
        if key not in self._eliminated:
            grams = self.sums.grams()
            if windows == "fit":
                grams = itertools.starmap(_of_fit, grams)
            table = with_elimination(self._tables[windows], grams, prices=prices)
            self._eliminated[key] = table
        return self._eliminated[key]

    @functools.cached_property
    def _tables(self) -> dict[str, ImportanceTable]:
        fit, held_out = (self._measured(part) for part in (self.fit, self.held_out))
        return {"fit": fit, "all": _together(fit, held_out, self.calibration)}

    def _measured(self, windows: CalibrationSet) -> ImportanceTable:
        progress = self._count.part(windows.n_sequences, cost=_OF_STATISTICS)
        return self._measure(windows, progress=progress)


def _of_fit(layer: ExpertsLayer, own: LayerGrams) -> tuple[ExpertsLayer, LayerGrams]:
    return layer, own.of_part(FIT)


def _together(
    fit: ImportanceTable, held_out: ImportanceTable, calibration: CalibrationSet
) -> ImportanceTable:
    """The statistics of all windows, as if they were measured in one pass."""
    sizes = {"n_sequences": calibration.n_sequences, "seq_len": calibration.seq_len}
    spec = {**fit.metadata["spec"], "calibration": calibration.fingerprint}
    made = {**fit.metadata["provenance"], "calibration": calibration.provenance | sizes}
    metadata = {
        **fit.metadata,
        "N": fit.metadata["N"] + held_out.metadata["N"],
        "windows": calibration.window_fingerprints(),
        "spec": spec,
        "spec_hash": digest(spec),
        "provenance": made,
    }
    return ImportanceTable.from_frame(
        merge_frames(fit.frame, held_out.frame), **metadata
    )
