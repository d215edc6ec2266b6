"""What a method is: a name, where it comes from, and a rule that fits it to a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import nn

from heapr_lab.errors import whole_number
from heapr_lab.methods import DESCRIBED, check_options
from heapr_lab.methods.collectors import Collector, Measurements
from heapr_lab.methods.composing import Compositions
from heapr_lab.methods.compression import (
    AtomCompression,
    Compression,
    ExpertComposition,
    Made,
)
from heapr_lab.methods.expert_axes import KeptExperts, check_in_memory
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.progress import Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import exact_ratio
from heapr_lab.pruning.surgery import ReplacedDownProj
from heapr_lab.text.calibration import CalibrationSet

_REPLACING = ("merging", "low rank")
"""What leaves other experts, for which the model must be in memory."""


@dataclass(frozen=True, eq=False)
class Request:
    """What a rule is asked for."""

    method: str
    """The name of the method."""
    ratio: Fraction
    """The share of the routed experts' parameters to remove, in [0, 1)."""
    seed: int
    options: Mapping[str, Any]
    """The value of every option of the method."""
    measured: Measurements
    """The model, the calibration windows, and what is measured with them."""
    progress: Progress | None = None

    @property
    def made(self) -> Made:
        """The record of the request and of what is measured by now."""
        routed = self.measured.routed
        return Made(self.method, float(self.ratio), self.seed, self.options, routed)

    @property
    def shapes(self) -> Mapping[int, LayerShape]:
        """The sizes of the dense model's layers."""
        return self.measured.architecture.layers

    def composed(
        self, compositions: Compositions, kept: KeptExperts | None = None
    ) -> ExpertComposition:
        """The compression with these experts in place of layers' own, or fewer."""
        return ExpertComposition(self.made, compositions, self.shapes, kept)

    def keeping(
        self,
        keep: KeepMask | Mapping[int, np.ndarray],
        down_projs: ReplacedDownProj | None = None,
    ) -> AtomCompression:
        """The compression that keeps the atoms of a mask, or of arrays by layer."""
        sizes = {layer: shape.atom_parameters for layer, shape in self.shapes.items()}
        made = self.made.to_dict()
        if isinstance(keep, KeepMask):
            mask = KeepMask(keep.arrays, {**made, **keep.settings})
        else:
            mask = KeepMask(keep, made)
        return AtomCompression(self.made, mask, sizes, down_projs)

    @property
    def model(self) -> nn.Module:
        """The dense model, which must not be changed."""
        return self.measured.model

    @property
    def calibration(self) -> CalibrationSet:
        """The windows to fit to."""
        return self.measured.calibration


@dataclass(frozen=True)
class Method:
    """A way to make a model smaller.

    Its rule measures what it needs through `Request.measured`, where each quantity is
    measured once for all methods and ratios, and rounds the ratio to what it can
    remove; `Compression.achieved_ratio` is exact.
    """

    name: str
    """As on the command line: lower case, words joined by hyphens."""
    title: str
    """One line for tables and menus."""
    citation: str
    """Authors, year, and where it is published."""
    compresses: str
    """What it removes or makes: atoms, experts, weights, merging or low rank."""
    rule: Callable[[Request], Compression] = field(repr=False)
    deviations: tuple[str, ...] = ()
    """How it differs from its paper and its authors' code, a sentence each."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Name to default of each option."""
    collectors: tuple[Collector, ...] = ()
    """What its rule reads with `Measurements.collected`, so that the text is read once
    for all methods that are fitted together."""
    version: int = 1
    """Increased whenever the same input would give another result."""

    def fit(
        self,
        model: nn.Module,
        calibration: CalibrationSet,
        *,
        ratio: float,
        seed: int = 0,
        progress: Progress | None = None,
        shared: Measurements | None = None,
        **options: Any,
    ) -> Compression:
        """How to compress `model`, which is not changed.

        Args:
            model: the dense model.
            calibration: windows of the text to fit to.
            ratio: the share of the routed experts' parameters to remove, in [0, 1).
            seed: the seed of the random numbers of methods that draw some.
            progress: called with (done, total) while text is read.
            shared: measurements of the same model and windows, which methods that are
                fitted one after the other have in common.
            **options: the options of the method, in place of its defaults.

        Raises:
            SpecError: the ratio or an option is invalid or infeasible, `shared` is of
                another model or other windows, `model` is streamed and the method
                replaces experts, or an active mask, autocast or hook changes what
                `model` computes.
            LayoutError: the method cannot treat the model's experts exactly.
        """
        refuse_disturbed(model, remedy="fit the method to the dense model")
        exact = exact_ratio(ratio, name="ratio")
        seed = whole_number(seed, name="seed", least=0)
        complete = self.completed(options)
        if self.compresses in _REPLACING:
            check_in_memory(model)
        measured = shared or Measurements(model, calibration)
        measured.check(model, calibration)
        measured.expect(self.collectors)
        return self.rule(Request(self.name, exact, seed, complete, measured, progress))

    def completed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options`, completed with the defaults.

        Raises:
            SpecError: there is no such option, or the value is of another type, no
                number, or a count below 1.
        """
        check_options(self.name, options, self.options)
        return {**self.options, **options}


OURS: dict[str, Method] = {}
"""The methods of this package whose modules are imported, by name."""


def ours(
    name: str, rule: Callable[[Request], Compression], *collectors: Collector
) -> None:
    """Add the method of this package that `methods.toml` describes under that name."""
    fields = {field: v for field, v in DESCRIBED[name].items() if field != "module"}
    OURS[name] = Method(name, rule=rule, collectors=collectors, **fields)
