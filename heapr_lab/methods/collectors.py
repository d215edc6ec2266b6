"""What methods measure on a model and calibration windows, each quantity once.

Shapes: E n_experts, D d_expert, I d_inter, n tokens; f an expert's output before its
routing weight p.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.methods.expert_axes import check_in_memory
from heapr_lab.models.architecture import Architecture
from heapr_lab.models.experts import ExpertsLayer, describe, find_experts
from heapr_lab.models.grouped_linear import accumulating_dtype
from heapr_lab.models.hooks import check_gradients, observed
from heapr_lab.models.identity import weights_state
from heapr_lab.models.likelihood import check_fits, input_device, token_nll
from heapr_lab.models.modes import assigned, differentiating, evaluating
from heapr_lab.models.ragged_experts import activate, normalises
from heapr_lab.progress import Progress, no_report
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.expert_calls import ExpertCalls, iter_expert_calls
from heapr_lab.text.calibration import CalibrationSet

ROWS_AT_ONCE = 4096
_TABLE = "table"
T = TypeVar("T")

Collector = Callable[[nn.Module, ExpertCalls], Any]
"""What is measured in a forward pass, layer by layer.

It takes the model, and what a layer's experts were called with in the dense model, and
returns what is kept of it. Without gradients, in evaluation mode."""
Stacks = dict[str, torch.Tensor]
"""Tensors of one layer by name, such as one for each projection."""
Terms = Callable[[ExpertsLayer, torch.Tensor, torch.Tensor], Stacks]
"""What is summed, of a layer and its gradients of a window: those of the input
projection, as `ExpertsLayer.up_rows`, and of W_down, (E, D, I)."""


def stacked(
    of_expert: Callable[[ExpertCalls, int], tuple[torch.Tensor, ...]],
    make: Callable[..., Any],
) -> Collector:
    """A collector: what `make` makes of the tensors of experts, stacked to (E, …)."""

    def of_layer(_model: nn.Module, calls: ExpertCalls) -> Any:
        rows = [of_expert(calls, expert) for expert in range(calls.layer.n_experts)]
        return make(*map(torch.stack, zip(*rows, strict=True)))

    return of_layer


class Measurements:
    """What is measured on one model and one set of windows, when it is first needed.

    Methods that are fitted with the same measurements read the text once: `table` takes
    one pass, and all collectors together take one, if they are expected; whatever the
    number of methods and ratios.
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
            calibration: the windows.
            measure: called with (windows, progress=…), returns the statistics on them,
                from a cache for example.
        """
        self.model, self.calibration = model, calibration
        self._measure = measure or functools.partial(collect_statistics, model)
        self._state = weights_state(model)
        self._expected: set[Collector] = {routed_tokens}
        self._collected: dict[Collector, dict[int, Any]] = {}
        self._once: dict[Hashable, Any] = {}

    def check(self, model: nn.Module, calibration: CalibrationSet) -> None:
        """Check that the measurements are of `model`, as it is now, and `calibration`.

        Raises:
            SpecError: they are not.
        """
        same = model is self.model and weights_state(model) == self._state
        if not same or calibration.fingerprint != self.calibration.fingerprint:
            raise SpecError(
                "the shared measurements are of another model, of other weights or of "
                "other calibration windows: begin new ones for these"
            )

    @functools.cached_property
    def architecture(self) -> Architecture:
        """The sizes of the dense model."""
        return describe(self.model)

    def table(self, progress: Progress | None = None) -> ImportanceTable:
        """The statistics of every atom: one forward and one backward pass."""
        return self.once(
            _TABLE, lambda: self._measure(self.calibration, progress=progress)
        )

    def experts(self, progress: Progress | None = None) -> pd.DataFrame:
        """Sums over the tokens routed to each expert, a row for each: a forward pass.

        Columns: layer, expert, `tokens`, `sum_p` Σ p, `sum_norm` Σ ‖f‖, `sum_norm2`
        Σ ‖f‖², `sum_p_norm` Σ p · ‖f‖. In float64.
        """
        rows = self.collected(expert_sums, progress)
        return pd.DataFrame([row for layer in rows.values() for row in layer])

    def tokens(self, progress: Progress | None = None) -> dict[int, list[int]]:
        """The tokens routed to each expert, by layer: a forward pass."""
        return self.collected(routed_tokens, progress)

    def expect(self, collectors: Iterable[Collector]) -> None:
        """Measure these, too, in the pass of the first of them that is needed."""
        self._expected |= set(collectors)

    def collected(
        self, collector: Collector, progress: Progress | None = None
    ) -> dict[int, Any]:
        """What `collector` keeps of each layer, by its number.

        If that is not known, layers are run one after the other, and all that is
        expected is collected.

        Raises:
            LayoutError: the experts cannot be measured.
        """
        if collector not in self._collected:
            wanted = {*self._expected, collector} - {*self._collected}
            new: dict[Collector, dict[int, Any]] = {each: {} for each in wanted}
            ids = self.calibration.ids
            for calls in iter_expert_calls(self.model, ids, progress=progress):
                with evaluating(self.model):
                    for each, kept in new.items():
                        kept[calls.layer.layer] = each(self.model, calls)
            self._collected |= new
        return self._collected[collector]

    def gradients(
        self, terms: Terms, progress: Progress | None = None
    ) -> dict[int, Stacks]:
        """`sum_over_windows` of what is asked for: a backward pass for each window."""
        return self.once(
            terms,
            lambda: sum_over_windows(self.model, self.calibration, terms, progress),
        )

    def once(self, name: Hashable, measure: Callable[[], T]) -> T:
        """What `measure` returned when it was first asked for by that name."""
        if name not in self._once:
            self._once[name] = measure()
        measured: T = self._once[name]
        return measured

    @functools.cached_property
    def fitted(self) -> CalibratedModel:
        """The sums that weights are made of, on the windows that `compress` fits to.

        Raises:
            SpecError: there are too few windows.
        """
        windows = self.calibration.three_parts()[0]
        return CalibratedModel(self.model, windows, measure=self._measure)

    @property
    def routed(self) -> pd.DataFrame | None:
        """Tokens routed to each expert, if something has been measured.

        Columns layer, expert, tokens.
        """
        if routed_tokens in self._collected:
            rows = [
                {"layer": layer, "expert": expert, "tokens": n}
                for layer, counts in self.tokens().items()
                for expert, n in enumerate(counts)
            ]
            return pd.DataFrame(rows)
        return self.table().expert_tokens() if _TABLE in self._once else None


def expert_sums(_model: nn.Module, calls: ExpertCalls) -> list[dict[str, float]]:
    """A row of `Measurements.experts` for each expert of a layer."""
    return [
        {"layer": calls.layer.layer, "expert": expert}
        | _sums(routed_outputs(calls, expert))
        for expert in range(calls.layer.n_experts)
    ]


def routed_tokens(_model: nn.Module, calls: ExpertCalls) -> list[int]:
    """The tokens routed to each expert of a layer; counted in every pass."""
    counts = calls.top_k_index.flatten().bincount(minlength=calls.layer.n_experts)
    return [int(n) for n in counts]


def activations(layer: ExpertsLayer, expert: int, x: torch.Tensor) -> torch.Tensor:
    """The activations h of an expert's atoms, routed to it or not: (n, D) to (n, I)."""
    biases = layer.up_bias
    bias = None if biases is None else biases[expert]
    return activate(layer.module, F.linear(x, layer.up_rows[expert], bias))


def expert_output(layer: ExpertsLayer, expert: int, x: torch.Tensor) -> torch.Tensor:
    """What an expert makes of x with routing weight 1: (n, D) to (n, D)."""
    biases = layer.down_bias
    bias = None if biases is None else biases[expert]
    f = F.linear(activations(layer, expert, x), layer.down[expert], bias)
    return layer.module.post_expert_norm(f) if normalises(layer.module) else f


def routed_outputs(
    calls: ExpertCalls, expert: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """An expert's outputs for the tokens routed to it: pairs of f (n, D) and p (n,)."""
    parts = (tensor.split(ROWS_AT_ONCE) for tensor in calls.routed(expert))
    for x, p in zip(*parts, strict=True):
        yield expert_output(calls.layer, expert, x), p


def _sums(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """The sums over the outputs of one expert."""
    names = ("sum_p", "sum_norm", "sum_norm2", "sum_p_norm")
    sums = {"tokens": 0} | dict.fromkeys(names, 0.0)
    for outputs, weights in pairs:
        if not len(outputs):
            continue
        f, p = outputs.to(accumulating_dtype(outputs)), weights.double()
        norms = f.norm(dim=1).double()
        sums["tokens"] += len(f)
        sums["sum_p"] += float(p.sum())
        sums["sum_norm"] += float(norms.sum())
        sums["sum_norm2"] += float(norms.square().sum())
        sums["sum_p_norm"] += float((p * norms).sum())
    return sums


# --- gradients of weights -----------------------------------------------------------
#
# The loss of a window is the sum over its predicted tokens of -log p. Every window is a
# batch of its own, so its gradients depend neither on other windows nor on their order.


def sum_over_windows(
    model: nn.Module,
    calibration: CalibrationSet,
    terms: Terms,
    progress: Progress | None = None,
) -> dict[int, Stacks]:
    """What `terms` makes of the gradients of a window and layer, summed, by layer.

    Weights of experts that no token of a window is routed to have the gradient 0. The
    model is in eval mode; its modes, flags and own gradients are restored. The
    gradients of all experts are in memory at once, as large as their weights.

    Args:
        model: the dense model, which must be in memory.
        calibration: the windows.
        terms: called once for each window and layer.
        progress: called with (windows done, windows in all).

    Raises:
        SpecError: the model is streamed, or a token is not in the vocabulary.
        LayoutError: the experts cannot be measured.
        CoverageError: a layer did not take part in a backward pass.
        HeaprLabError: a gradient is not finite.
    """
    check_in_memory(model)
    check_fits(model, calibration.ids)
    report = progress or no_report
    layers = find_experts(model)
    parameters = [weight for layer in layers for weight in layer.projections]
    sums: dict[int, Stacks] = {}
    with (
        assigned([(weight, "grad", None) for weight in parameters]),
        differentiating(model, parameters),
        # With an observer the experts run in this package's own way: there the gradient
        # of a weight takes one product for each expert, while that of transformers'
        # eager experts is a sum of E tensors as large as the whole weight.
        observed(layers, [lambda _call: None] * len(layers)),
    ):
        for number, window in enumerate(calibration.ids):
            # A clone is no inference tensor, even if the ids are one.
            ids = window[None].clone().to(input_device(model))
            token_nll(model, ids).sum().backward()
            for layer in layers:
                up, down = (_taken(layer, weight) for weight in layer.projections)
                new = terms(layer, up, down)
                before = sums.get(layer.layer, dict.fromkeys(new, 0))
                sums[layer.layer] = {n: before[n] + v for n, v in new.items()}
            report(number + 1, calibration.n_sequences)
    return sums


def _taken(layer: ExpertsLayer, weight: nn.Parameter) -> torch.Tensor:
    """The gradient of a weight, which has none afterwards.

    Raises:
        CoverageError: it has none.
        HeaprLabError: it is not finite.
    """
    gradient, weight.grad = weight.grad, None
    times = int(gradient is not None)
    finite = gradient is None or bool(torch.isfinite(gradient).all())
    check_gradients(layer.layer, times, finite=finite, where="a window")
    assert gradient is not None
    return layer.oriented(gradient)
