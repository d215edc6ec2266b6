"""A dense model with what is measured of it on calibration windows, each thing once.

One of them serves any number of selections: only masks and solves are new.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn

from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.estimators import find_estimator
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.progress import Parts, Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.refinement.activation_grams import (
    LayerGrams,
    default_span,
    fits_in_memory,
    iter_grams,
)
from heapr_lab.refinement.compensation import (
    Compensation,
    LayerSolver,
    check_layers,
    compensation_of,
)
from heapr_lab.refinement.elimination import with_elimination
from heapr_lab.refinement.stored_layers import (
    StoredSums,
    layer_store,
    new_downs,
)
from heapr_lab.text.calibration import CalibrationSet


class CalibratedModel:
    """Statistics, sums, and the masks and weights that are made of them.

    Attributes:
        model: the dense model.
        windows: the calibration windows.
        sums: the sums of every layer, and the solvers made of them.
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
        self.sums = LayerSums(model, find_experts(model), windows)
        self._measure = measure or functools.partial(collect_statistics, model)
        self._tables: dict[str, ImportanceTable] = {}

    @property
    def n_passes(self) -> int:
        """Passes of `compensated` for an estimator that takes an extra one."""
        return 2 if self.sums.at_once else 3

    def table(
        self, estimator: str = "heapr", progress: Progress | None = None
    ) -> ImportanceTable:
        """The statistics of every atom, with the scores of `estimator`.

        `progress` is called with windows: twice as many where it takes a second pass.
        """
        eliminated = find_estimator(estimator).extra_pass
        name = estimator if eliminated else ""
        if name not in self._tables:
            parts = Parts((1 + eliminated) * self.windows.n_sequences, progress)
            self._tables[name] = self._made(estimator, parts)
        return self._tables[name]

    def _made(self, estimator: str, progress: Parts) -> ImportanceTable:
        if not find_estimator(estimator).extra_pass:
            return self._measure(self.windows, progress=progress)
        table = self.table(progress=progress)
        progress.end(self.windows.n_sequences)
        grams = self.sums.grams(progress)
        return with_elimination(table, grams)

    def keep(self, selection: Selection, progress: Progress | None = None) -> KeepMask:
        """The mask of a selection.

        Raises:
            SpecError: the selection is infeasible.
        """
        return select(self.table(selection.estimator, progress), selection)

    def compensated(
        self,
        selection: Selection,
        *,
        span: str | None = None,
        progress: Progress | None = None,
    ) -> tuple[KeepMask, Compensation]:
        """The mask of a selection, and the weights that make up for the others.

        Args:
            selection: how atoms are selected.
            span: as in `compensation.compensate`; by default that of the sums.
            progress: called with (windows done, windows in all).

        Raises:
            SpecError: the selection is infeasible.
        """
        parts = Parts(self.n_passes * self.windows.n_sequences, progress)
        keep = self.keep(selection, parts)
        parts.end((self.n_passes - 1) * self.windows.n_sequences)
        solvers = self.sums.solvers(span or self.sums.span, parts)
        down_projs = new_downs(self.sums.store)
        return keep, compensation_of(solvers, keep, down_projs=down_projs)


class LayerSums:
    """The sums of every layer, and the solvers made of them, for each span.

    What is beyond the budget of a streamed model is in files. Where the sums of all
    layers of another one do not fit into memory together, each use takes a pass.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[ExpertsLayer],
        calibration: CalibrationSet,
    ) -> None:
        """Nothing is run yet.

        Args:
            model: the dense model.
            layers: all of its layers.
            calibration: the windows, of which every fourth is held out.

        Raises:
            SpecError: the model is streamed, and there is no room for all sums.
        """
        self.span = default_span(layers)
        check_layers(layers, self.span)
        self._model, self._calibration = model, calibration
        self.store = layer_store(model, layers, span=self.span)
        """Where they are kept, if the model is streamed."""
        self._kept: Iterable[tuple[ExpertsLayer, LayerGrams]] | None = None
        self._solvers: dict[str, list[LayerSolver]] = {}
        self._fits = self.store is None and fits_in_memory(layers, self.span)

    @property
    def at_once(self) -> bool:
        """Whether one pass serves every use."""
        return self.store is not None or self._fits

    def grams(
        self, progress: Progress | None = None
    ) -> Iterator[tuple[ExpertsLayer, LayerGrams]]:
        """The sums of each layer, in order, for the default span.

        `progress` is called with (windows done, windows in all) of a pass.
        """
        if self._kept is not None:
            return iter(self._kept)
        grams = iter_grams(
            self._model, self._calibration, span=self.span, progress=progress
        )
        if self.store is not None:
            self._kept = StoredSums(self.store, grams)
        elif self._fits:
            self._kept = list(grams)
        else:
            return grams
        return iter(self._kept)

    def solvers(
        self, span: str, progress: Progress | None = None
    ) -> Iterator[LayerSolver]:
        """The solver of each layer, in order; `progress` as in `grams`."""
        if span in self._solvers:
            return iter(self._solvers[span])
        solvers = map(functools.partial(_solver, span), self.grams(progress))
        if not self._fits:
            return solvers
        self._solvers[span] = list(solvers)
        return iter(self._solvers[span])


def _solver(span: str, pair: tuple[ExpertsLayer, LayerGrams]) -> LayerSolver:
    layer, grams = pair
    return LayerSolver(layer, grams if span == grams.span else grams.within_experts())
