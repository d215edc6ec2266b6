"""Sums and solvers of a model's layers, from one pass where they fit into memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from heapr_lab.importance.activation_grams import (
    LayerGrams,
    default_span,
    fits_in_memory,
    iter_grams,
)
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.progress import Progress
from heapr_lab.refinement.compensation import LayerSolver, check_layers
from heapr_lab.text.calibration import CalibrationSet


class LayerSums:
    """The sums of every layer, and the solvers made of them, for each span.

    Where the sums of all layers do not fit into memory together, each use takes a
    forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[ExpertsLayer],
        calibration: CalibrationSet,
        *,
        progress: Callable[[int], Progress],
    ) -> None:
        """Nothing is run yet.

        Args:
            model: the dense model.
            layers: all of its layers.
            calibration: the windows, of which every fourth is held out.
            progress: called at each pass with its number of windows, for its progress.
        """
        self.span = default_span(layers)
        check_layers(layers, self.span)
        self.n_passes = 0
        self._model, self._calibration, self._progress = model, calibration, progress
        self._kept: list[tuple[ExpertsLayer, LayerGrams]] | None = None
        self._solvers: dict[str, list[LayerSolver]] = {}
        self._fits = fits_in_memory(layers, self.span)

    def grams(self) -> Iterator[tuple[ExpertsLayer, LayerGrams]]:
        """The sums of each layer, in order, for the default span."""
        if self._kept is not None:
            yield from self._kept
            return
        self.n_passes += 1
        progress: Any = self._progress(self._calibration.n_sequences)
        found = iter_grams(
            self._model, self._calibration, span=self.span, progress=progress
        )
        if self._fits:
            self._kept = list(found)
            found = iter(self._kept)
        yield from found

    def solvers(self, span: str) -> Iterator[LayerSolver]:
        """The solver of each layer, in order."""
        if span in self._solvers:
            yield from self._solvers[span]
            return
        made = []
        for layer, own in self.grams():
            sums = own if span == self.span else own.within_experts()
            solver = LayerSolver(layer, sums)
            if self._fits:
                made.append(solver)
            yield solver
        if self._fits:
            self._solvers[span] = made
