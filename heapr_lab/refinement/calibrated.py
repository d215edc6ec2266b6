"""A dense model with what is measured of it on calibration windows, each thing once.

One of them serves any number of selections: only masks and solves are new.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.columns import pooled
from heapr_lab.importance.estimators import find_estimator
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.progress import Parts, Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.refinement.activation_grams import (
    LayerGrams,
    by_layer,
    checked_span,
    fits_in_memory,
    iter_grams,
    layer_store,
)
from heapr_lab.refinement.compensation import Compensation, LayerSolver, compensation_of
from heapr_lab.refinement.elimination import EliminationScores, with_elimination
from heapr_lab.text.calibration import CalibrationSet

Summed = tuple[ExpertsLayer, LayerGrams]


class CalibratedModel:
    """Statistics, sums, and the masks and weights that are made of them.

    Attributes:
        model: the dense model.
        windows: the calibration windows.
        span: that of the sums, which are of every layer.
    """

    def __init__(
        self,
        model: nn.Module,
        windows: CalibrationSet,
        *,
        measure: Callable[..., ImportanceTable] | None = None,
    ) -> None:
        """Nothing is run yet.

        Args:
            model: the dense model, which is not changed.
            windows: at least two, of which every fourth chooses the ridges.
            measure: called with (windows, progress=…), returns the statistics on them,
                from a cache for example.

        Raises:
            SpecError: there is no room for the sums of a streamed model.
            LayoutError: weights are offloaded, or not finite.
        """
        self.model, self.windows = model, windows
        self._layers = find_experts(model)
        self.span = checked_span(self._layers)
        self._store = layer_store(model, self._layers, span=self.span)
        fits = self._store is None and fits_in_memory(self._layers, self.span)
        self._sums, self._fits = by_layer(self._store, "sums"), fits
        self._tokens: dict[int, torch.Tensor] = {}
        self._solvers: list[LayerSolver] = []
        self._measure = measure or functools.partial(collect_statistics, model)
        self._table: ImportanceTable | None = None
        self._eliminated: ImportanceTable | None = None
        self._others: dict[str, ImportanceTable] = {}

    @property
    def at_once(self) -> bool:
        """Whether one pass gives the sums for every use.

        What is beyond the budget of a streamed model is in files. Where the sums of all
        layers of another one do not fit into memory together, each use takes a pass.
        """
        return self._store is not None or self._fits

    def n_passes(self, estimator: str = "heapr", *, compensated: bool = False) -> int:
        """Passes over the windows that `table`, or `compensated`, has still to take."""
        eliminates = find_estimator(estimator).extra_pass and self._eliminated is None
        n_uses = eliminates + compensated  # of the sums
        if self.at_once:
            n_uses = 0 if self._tokens else min(n_uses, 1)
        return (self._table is None) + n_uses

    def table(
        self, estimator: str = "heapr", progress: Progress | None = None
    ) -> ImportanceTable:
        """The statistics of every atom, with the scores of `estimator`.

        `progress` is called with the windows of `n_passes`.
        """
        n_windows = self.windows.n_sequences
        parts = Parts(self.n_passes(estimator) * n_windows, progress)
        if self._table is None:
            self._table = self._measure(self.windows, progress=parts.part(n_windows))
        if not find_estimator(estimator).extra_pass:
            return self._table
        if self._eliminated is None:
            grams = self._grams(parts.part(n_windows))
            self._eliminated = with_elimination(self._table, self.windows, grams)
        return self._eliminated

    def keep(self, selection: Selection, progress: Progress | None = None) -> KeepMask:
        """The mask of a selection.

        Raises:
            SpecError: the selection is infeasible.
        """
        return select(self.table(selection.estimator, progress), selection)

    def keep_on_all(
        self,
        selection: Selection,
        others: Sequence[CalibrationSet],
        progress: Progress | None = None,
    ) -> KeepMask:
        """The mask by statistics of all windows: these, and the `others`.

        Args:
            selection: how atoms are selected, by an estimator without an extra pass.
            others: more windows, which may repeat these.
            progress: called with (windows done, windows in all) of the others.

        Raises:
            SpecError: the selection is infeasible.
        """
        parts = Parts(sum(windows.n_sequences for windows in others), progress)
        tables = [self.table()]
        for windows in others:
            progress = parts.part(windows.n_sequences)
            tables.append(self._measured(windows, progress))
        frame = functools.reduce(pooled, [table.frame for table in tables])
        predicted = sum(table.metadata["N"] for table in tables)
        sizes = tables[0].architecture.to_dict()
        whole = ImportanceTable.from_frame(frame, N=predicted, architecture=sizes)
        return select(whole, selection)

    def _measured(self, windows: CalibrationSet, progress: Progress) -> ImportanceTable:
        """The statistics on other windows, measured once."""
        key = windows.fingerprint
        if key not in self._others:
            self._others[key] = self._measure(windows, progress=progress)
        return self._others[key]

    def compensated(
        self,
        selection: Selection,
        *,
        eliminate: bool = False,
        progress: Progress | None = None,
    ) -> tuple[KeepMask, Compensation]:
        """The mask of a selection, and the weights that make up for the others.

        Args:
            selection: how atoms are selected.
            eliminate: whether the sums of a layer, where not all are kept, are used for
                the scores of elimination as well, which are then known without a pass.
            progress: called with (windows done, windows in all) of `n_passes`.

        Raises:
            SpecError: the selection is infeasible.
        """
        n_windows, estimator = self.windows.n_sequences, selection.estimator
        n_passes = self.n_passes(estimator, compensated=True)
        n_before = self.n_passes(estimator)
        parts = Parts(n_passes * n_windows, progress)
        keep = self.keep(selection, parts.part(n_before * n_windows))
        scores = eliminate and not self.at_once and self._eliminated is None
        solvers = self._solvers_of(parts.part(n_windows), eliminate=scores)
        down_projs = by_layer(self._store, "down")
        fitted = compensation_of(solvers, keep, down_projs=down_projs)
        settings = fitted.settings | {"windows": n_windows}
        return keep, replace(fitted, settings=settings)

    def _grams(self, progress: Progress | None) -> Iterator[Summed]:
        """The sums of each layer, in order.

        `progress` is called with (windows done, windows in all) of a pass.
        """
        if not self._tokens:
            grams = iter_grams(
                self.model, self.windows, span=self.span, progress=progress
            )
            if not self.at_once:
                return grams
            tokens = {}
            for layer, sums in grams:
                self._sums[layer.layer] = sums.sums
                tokens[layer.layer] = sums.tokens
                del sums  # before those of the next layer
            self._tokens = tokens
        return map(self._read, self._layers)

    def _read(self, layer: ExpertsLayer) -> Summed:
        sums = self._sums[layer.layer].to(layer.device)
        return layer, LayerGrams(self.span, sums, self._tokens[layer.layer])

    def _eliminating(self, grams: Iterator[Summed]) -> Iterator[Summed]:
        """The sums of each layer, which are used for scores on their way."""
        scores = EliminationScores(self.table(), self.windows)
        for layer, sums in grams:
            scores.add(layer, sums)
            yield layer, sums
            del sums  # before those of the next layer
        self._eliminated = scores.table()

    def _solvers_of(
        self, progress: Progress | None, *, eliminate: bool
    ) -> Iterator[LayerSolver]:
        """The solver of each layer, in order.

        `progress` is called with (windows done, windows in all) of a pass.
        """
        if self._solvers:
            return iter(self._solvers)
        grams = self._grams(progress)
        grams = self._eliminating(grams) if eliminate else grams
        solvers = itertools.starmap(LayerSolver, grams)
        if not self._fits:
            return solvers
        self._solvers = list(solvers)
        return iter(self._solvers)
