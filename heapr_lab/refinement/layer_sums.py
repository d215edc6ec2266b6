"""Sums and solvers of a model's layers, from one pass where they fit into memory."""

import functools
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.progress import Progress
from heapr_lab.refinement.activation_grams import (
    LayerGrams,
    default_span,
    fits_in_memory,
    iter_grams,
)
from heapr_lab.refinement.compensation import LayerSolver, check_layers
from heapr_lab.refinement.stored_layers import NewDowns, layer_store
from heapr_lab.text.calibration import CalibrationSet


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
        self.n_passes = 0
        self._model, self._calibration = model, calibration
        self._store = layer_store(model, layers, span=self.span)
        self._kept: Iterable[tuple[ExpertsLayer, LayerGrams]] | None = None
        self._solvers: dict[str, list[LayerSolver]] = {}
        self._fits = self._store is None and fits_in_memory(layers, self.span)

    @property
    def at_once(self) -> bool:
        """Whether one pass serves every use."""
        return self._store is not None or self._fits

    def grams(
        self, progress: Progress | None = None
    ) -> Iterator[tuple[ExpertsLayer, LayerGrams]]:
        """The sums of each layer, in order, for the default span.

        `progress` is called with (windows done, windows in all) of a pass.
        """
        if self._kept is not None:
            return iter(self._kept)
        self.n_passes += 1
        grams = iter_grams(
            self._model, self._calibration, span=self.span, progress=progress
        )
        if self._store is not None:
            self._kept = self._store.kept(grams)
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

    def new_downs(self) -> NewDowns:
        """A place for the W_down of all layers."""
        return {} if self._store is None else self._store.new_downs()


def _solver(span: str, pair: tuple[ExpertsLayer, LayerGrams]) -> LayerSolver:
    layer, grams = pair
    return LayerSolver(layer, grams if span == grams.span else grams.within_experts())
