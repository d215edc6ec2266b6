"""How to select, whatever the ratio: checked settings, and ratios as exact fractions.

Layer 1, without torch. Used through `selection`.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from heapr_lab.errors import SpecError, whole_number
from heapr_lab.importance.estimators import complete_options, find_estimator

CHOICES = {
    "scope": ("global", "layer"),
    "granularity": ("atom", "expert"),
    "structure": ("ragged", "aligned", "per_layer", "uniform"),
    "of": ("atoms", "model", "bytes", "flops"),
}
"""The settings that are one of a few words."""
_TOO_MANY = 2**31
"""Atoms that no expert has."""


def exact_ratio(value: Any, *, name: str = "pruning ratio") -> Fraction:
    """The decimal that `value` was written as: 0.1 is 1/10.

    Args:
        value: a Python or NumPy number, a Fraction or a Decimal.
        name: what to call it in an error.

    Raises:
        SpecError: it is not a number in [0, 1).

    Example:
        >>> exact_ratio(0.29) * 100
        Fraction(29, 1)
    """
    ratio = as_fraction(value, name=name)
    if not 0 <= ratio < 1:
        raise SpecError(
            f"{name} must be in [0, 1), got {value}; give a fraction (0.25), not per "
            "cent"
        )
    return ratio


def as_fraction(value: Any, *, name: str) -> Fraction:
    """The decimal that `value` was written as.

    Raises:
        SpecError: it is not a number.
    """
    if isinstance(value, bool | np.bool_ | str):
        raise SpecError(f"{name} must be a number in [0, 1), got {value!r}")
    try:
        return Fraction(str(value))  # str gives the shortest decimal of a float
    except ValueError as error:
        raise SpecError(f"{name} must be a number in [0, 1), got {value!r}") from error


def layer_numbers(values: Iterable[Any], *, name: str) -> tuple[int, ...]:
    """Numbers of layers, ascending, each once.

    Args:
        values: whole numbers; a text is none, nor are its characters.
        name: what to call them in an error.

    Raises:
        SpecError: they are something else.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise SpecError(f"{name} must be a list of layer numbers, got {values!r}")
    numbers = {
        whole_number(value, name=f"a layer of {name}", least=0) for value in values
    }
    return tuple(sorted(numbers))


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Everything but the ratios that decides which atoms go; see `selection.select`.

    Equal rules rank the atoms of a table alike, so they are the key of its memory.
    """

    estimator: str = "heapr"
    estimator_options: tuple[tuple[str, Any], ...] = ()
    scope: str = "global"
    granularity: str = "atom"
    structure: str = "ragged"
    multiple: int | None = None
    of: str = "atoms"
    own_layers: tuple[int, ...] = ()
    """Layers with a ratio of their own."""
    exclude_layers: tuple[int, ...] = ()
    min_atoms: int = 0
    protect_outliers: Fraction = Fraction(0)
    protect_unrouted: bool = False
    price: Fraction | None = None
    """The share of an atom's price that is traffic; None ranks whatever it costs."""

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise SpecError(
                    f"{name} must be one of {', '.join(map(repr, known))}, got "
                    f"{getattr(self, name)!r}"
                )
        options = complete_options(self.estimator, dict(self.estimator_options))
        object.__setattr__(self, "estimator_options", tuple(sorted(options.items())))
        if find_estimator(self.estimator).within_layer and self.scope == "global":
            raise SpecError(
                f"estimator {self.estimator!r} ranks atoms within a layer, got scope "
                "'global'; give scope='layer'"
            )
        self._settle_counts()
        self._check_combinations()

    def _settle_counts(self) -> None:
        for name, least in (("min_atoms", 0), ("multiple", 1)):
            value = getattr(self, name)
            if value is not None:
                number = whole_number(value, name=name, least=least)
                if number >= _TOO_MANY:
                    raise SpecError(
                        f"{name} is {number:,}: no expert has so many atoms"
                    )
                object.__setattr__(self, name, number)
        for name in ("protect_outliers", "price"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise SpecError(
                    f"{name} must be in [0, 1], got {float(value)}; give a fraction, "
                    "not per cent"
                )

    def _check_combinations(self) -> None:
        if self.granularity == "expert" and self.structure != "ragged":
            raise SpecError(
                f"granularity 'expert' goes with structure 'ragged', got "
                f"{self.structure!r}: whole experts have no widths to round"
            )
        if self.structure == "aligned" and self.multiple is None:
            raise SpecError(
                "structure 'aligned' needs `multiple`, got None; give the number that "
                "widths are to be a multiple of, such as 16"
            )
        if self.structure == "ragged" and self.multiple is not None:
            raise SpecError(
                f"structure 'ragged' does not round widths, got multiple="
                f"{self.multiple}; give structure='aligned', or leave it out"
            )
        both = sorted({*self.own_layers} & {*self.exclude_layers})
        if both:
            raise SpecError(f"layers {both} are in layer_ratios and in exclude_layers")
        if self.own_layers and self.of != "atoms":
            raise SpecError(
                f"layer_ratios are shares of a layer's atoms, got of={self.of!r}; give "
                "of='atoms'"
            )
        if self.structure == "uniform" and (self.own_layers or self.exclude_layers):
            raise SpecError(
                "structure 'uniform' has one width for all layers, got layer_ratios or "
                "exclude_layers; give structure='per_layer'"
            )

    @property
    def step(self) -> int:
        """What widths are rounded to a multiple of."""
        return self.multiple or 1

    @property
    def counts_atoms_exactly(self) -> bool:
        """Whether atoms go one by one."""
        return self.granularity == "atom" and self.structure == "ragged"

    @property
    def in_one_group(self) -> bool:
        """Whether layers without a ratio of their own are pruned together."""
        return self.scope == "global" or self.structure == "uniform"

    @property
    def of_weights(self) -> bool:
        """Whether ratios are of the whole model's weights."""
        return self.of in {"model", "bytes"}  # the same, of weights of one dtype

    @property
    def unit(self) -> str:
        """What amounts to remove are counted in: "atoms", "parameters" or "flops"."""
        if self.of == "flops":
            return "flops"
        return "parameters" if self.of_weights and self.in_one_group else "atoms"

    def groups(self, layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The layers that are pruned together: first those without their own ratio.

        Raises:
            SpecError: the rules name a layer that is not in `layers`, or exclude all.
        """
        named = {*self.own_layers, *self.exclude_layers}
        unknown = sorted(named.difference(layers))
        if unknown:
            raise SpecError(
                f"no routed experts in layers {', '.join(map(str, unknown))}; layers "
                f"with routed experts: {', '.join(map(str, layers))}"
            )
        if set(layers) == {*self.exclude_layers}:
            raise SpecError("exclude_layers names every layer with routed experts")
        alone = self.own_layers if self.in_one_group else layers
        together = tuple(layer for layer in layers if layer not in alone)
        return tuple(g for g in (together, *((layer,) for layer in alone)) if g)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain = dataclasses.asdict(self)
        plain["estimator_options"] = dict(self.estimator_options)
        plain["own_layers"] = list(self.own_layers)
        plain["exclude_layers"] = list(self.exclude_layers)
        plain["protect_outliers"] = float(self.protect_outliers)
        plain["price"] = None if self.price is None else float(self.price)
        return plain
