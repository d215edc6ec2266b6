"""How atoms are selected: `Selection`, checked, hashable, to and from JSON.

Without torch. Used by `selection.select`, the cache, the panel, the command line and
the manifests of checkpoints.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Self

import numpy as np

from heapr_lab.errors import SpecError, check_names, one_of, whole_number
from heapr_lab.importance.estimators import complete_options, find_estimator
from heapr_lab.repr_html import card_html

STRUCTURES = ("ragged", "aligned", "per_layer", "uniform")
"""The widths that a pruned model's experts may have; see `selection.select`."""
CHOICES = {
    "scope": ("global", "layer"),
    "granularity": ("atom", "expert"),
    "structure": STRUCTURES,
    "of": ("atoms", "model"),
}
"""The fields of a `Selection` that are one of a few words, with these words."""
BUDGETS = {"atoms": "atoms", "model": "parameters (model)"}
"""What the ratio counts, as text; `of` and `--of` take the keys."""
_MOST_ATOMS = 2**31 - 1
"""No expert has more."""
_LAYERS = re.compile(r"([0-9]{1,6})(?:\s*[-–]\s*([0-9]{1,6}))?")
_REMOVED: Mapping[str, Any] = {
    "price": None,
    "protect_outliers": 0.0,
    "protect_unrouted": False,
    "layer_ratios": {},
    "own_layers": [],
}
"""Fields that earlier versions had, and their defaults."""
_REMOVED_VALUES: Mapping[str, Any] = {
    "of": ("flops", "bytes"),
    "estimator": ("weighted", "taylor", "shrunk", "elimination_shrunk"),
}
"""Values of other fields that they had."""


def exact_ratio(value: Any, *, name: str = "pruning ratio") -> Fraction:
    """The decimal that `value` was written as: 0.1 is 1/10.

    Args:
        value: a Python or NumPy number, a Fraction or a Decimal.
        name: its name in an error message.

    Raises:
        SpecError: it is not a number in [0, 1).

    Example:
        >>> exact_ratio(0.29) * 100
        Fraction(29, 1)
    """
    number = "" if isinstance(value, bool | np.bool_ | str) else str(value)
    try:
        ratio = Fraction(number)  # str gives the shortest decimal of a float
    except ValueError as error:
        raise SpecError(f"{name} must be a number in [0, 1), got {value!r}") from error
    if not 0 <= ratio < 1:
        raise SpecError(
            f"{name} must be in [0, 1), got {value}; give a fraction (0.25), not per "
            "cent"
        )
    return ratio


def layer_numbers(values: Iterable[Any], *, name: str) -> tuple[int, ...]:
    """Numbers of layers, ascending, each once.

    Args:
        values: whole numbers; not a string.
        name: their name in an error message.

    Raises:
        SpecError: they are not a list of layer numbers.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise SpecError(f"{name} must be a list of layer numbers, got {values!r}")
    numbers = {
        whole_number(value, name=f"a layer of {name}", least=0) for value in values
    }
    return tuple(sorted(numbers))


def read_ratio(text: str) -> float:
    """A ratio in [0, 1) as people write it: a fraction, or per cent with the sign.

    Raises:
        SpecError: the text is anything else, or the ratio is not in [0, 1).

    Example:
        >>> read_ratio("0.333"), read_ratio("33.3 %"), read_ratio("0,4")
        (0.333, 0.333, 0.4)
    """
    number = text.strip().replace(",", ".")
    percent = number.endswith("%")
    try:
        value = Decimal(number.removesuffix("%").strip()) / (100 if percent else 1)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or not 0 <= value < 1:
        raise SpecError(
            f"the ratio is {text!r}, expected a fraction from 0 to below 1, such as "
            f"0.40, or per cent with the sign, such as 40%{_meant(value, percent)}"
        )
    return float(value)


def _meant(value: Decimal, percent: bool) -> str:
    """A suggestion for a number that was probably meant as per cent."""
    if percent or not value.is_finite() or not 1 <= value < 100:
        return ""
    return f": write {value / 100:.2f} or {value:g}% if you mean that"


def parse_layers(text: str, *, name: str) -> tuple[int, ...]:
    """The layers in a list of numbers and ranges as people write it, ascending.

    Args:
        text: numbers and ranges, separated by commas.
        name: what to call the list in an error.

    Raises:
        SpecError: a part is neither, or a range runs backwards.

    Example:
        >>> parse_layers("5-7, 0", name="layers not pruned")
        (0, 5, 6, 7)
    """
    numbers: set[int] = set()
    for part in filter(None, map(str.strip, text.split(","))):
        match = _LAYERS.fullmatch(part)
        if match is None:
            raise SpecError(
                f"{name}: cannot read {part[:40]!r}; give layer numbers and ranges "
                "separated by commas, such as 0, 5-7"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise SpecError(
                f"{name}: the range {part!r} runs backwards; give the lower number "
                f"first, {last}-{first}"
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


@dataclass(frozen=True, repr=False)
class Selection:
    """How atoms are selected; `selection.select` applies it to a table.

    Equal selections prune the same atoms of a table. Every field is checked and
    normalised when a selection is created.

    Raises:
        SpecError: a field has an invalid value, or two fields contradict each other.
            Errors that depend on the table (unknown layers, a ratio above the largest
            possible one) are raised by `select`.

    Example:
        >>> selection = Selection(0.25, structure="aligned", multiple=16)
        >>> Selection.from_dict(selection.to_dict()) == selection
        True
    """

    ratio: float
    """The share to prune, in [0, 1), taken as the decimal that it was written as; a
    Fraction or a Decimal is accepted."""
    estimator: str = "heapr"
    """A name in `estimators.ESTIMATORS`."""
    scope: str = "global"
    """Rank the atoms of all layers together, or "layer" by layer."""
    granularity: str = "atom"
    """Prune single atoms, or each "expert" as a whole, by the sum of its scores."""
    structure: str = "ragged"
    """"ragged", a width for each expert; "aligned", a width that is a multiple;
    "per_layer", one width for each layer; "uniform", one width for the model. Every
    expert keeps its own best atoms."""
    multiple: int | None = None
    """Widths are a multiple of it (or 0, or whole); needed for "aligned", 1 for
    "per_layer" and "uniform" unless given."""
    of: str = "atoms"
    """What the ratio counts: routed "atoms", or parameters of the whole "model"."""
    exclude_layers: tuple[int, ...] = ()
    """Layers that are not pruned."""
    min_atoms: int = 0
    """Every expert keeps at least this many atoms (or all that it has)."""
    estimator_options: tuple[tuple[str, Any], ...] = ()
    """(name, value), such as `alpha` of camera; a mapping is accepted."""

    def __post_init__(self) -> None:
        self._settle_words()
        self._settle_numbers()
        self._check_combinations()

    # --- checks ---------------------------------------------------------------

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _settle_words(self) -> None:
        for name, known in CHOICES.items():
            one_of(getattr(self, name), known, name=name)
        try:
            named = dict(self.estimator_options)
        except (TypeError, ValueError) as error:
            raise SpecError(
                "estimator_options must be values by name, such as {'alpha': 0.5}, got "
                f"{self.estimator_options!r}"
            ) from error
        options = complete_options(self.estimator, named)
        self._set(estimator_options=tuple(sorted(options.items())))
        if find_estimator(self.estimator).within_layer and self.scope == "global":
            raise SpecError(
                f"estimator {self.estimator!r} ranks atoms within a layer, got scope "
                "'global'; give scope='layer'"
            )

    def _settle_numbers(self) -> None:
        self._set(
            ratio=_shortest(exact_ratio(self.ratio), self.ratio),
            exclude_layers=layer_numbers(self.exclude_layers, name="exclude_layers"),
        )
        for name, least in (("min_atoms", 0), ("multiple", 1)):
            value = getattr(self, name)
            if value is not None:
                number = whole_number(value, name=name, least=least, most=_MOST_ATOMS)
                self._set(**{name: number})

    def _check_combinations(self) -> None:
        if self.granularity == "expert" and self.structure != "ragged":
            raise SpecError(
                f"granularity 'expert' requires structure 'ragged', got "
                f"{self.structure!r}: whole experts have no widths to round"
            )
        if self.structure == "aligned" and self.multiple is None:
            raise SpecError(
                "structure 'aligned' needs `multiple`, got None; give the number that "
                "all widths must be a multiple of, such as 16"
            )
        if self.structure == "ragged" and self.multiple is not None:
            raise SpecError(
                f"structure 'ragged' does not round widths, got multiple="
                f"{self.multiple}; give structure='aligned', or omit it"
            )
        if self.structure == "uniform" and self.exclude_layers:
            raise SpecError(
                "structure 'uniform' has one width for all layers, got exclude_layers; "
                "give structure='per_layer'"
            )

    # --- derived properties -----------------------------------------------------

    @property
    def ranking_key(self) -> Self:
        """The selection without its ratio: equal keys give the same ranking."""
        return replace(self, ratio=0.0)

    @property
    def step(self) -> int:
        """The number that widths are rounded to a multiple of."""
        return self.multiple or 1

    @property
    def counts_atoms_exactly(self) -> bool:
        """Whether atoms are pruned one by one."""
        return self.granularity == "atom" and self.structure == "ragged"

    @property
    def in_one_group(self) -> bool:
        """Whether all layers are pruned together."""
        return self.scope == "global" or self.structure == "uniform"

    @property
    def unit(self) -> str:
        """The unit of the amount to prune: "atoms" or "parameters"."""
        whole = self.of == "model" and self.in_one_group
        return "parameters" if whole else "atoms"

    def groups(self, layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The layers that are pruned together.

        Raises:
            SpecError: the selection names a layer that is not in `layers`, or excludes
                all of them.
        """
        unknown = sorted({*self.exclude_layers}.difference(layers))
        if unknown:
            raise SpecError(
                f"no routed experts in layers {', '.join(map(str, unknown))}; layers "
                f"with routed experts: {', '.join(map(str, layers))}"
            )
        if set(layers) == {*self.exclude_layers}:
            raise SpecError("exclude_layers names every layer with routed experts")
        return (layers,) if self.in_one_group else tuple((layer,) for layer in layers)

    # --- as text and as data ----------------------------------------------------

    def __repr__(self) -> str:
        given = fields_given(self).items()
        named = [f"{name}={value!r}" for name, value in given if name != "ratio"]
        return f"Selection({', '.join([repr(self.ratio), *named])})"

    @property
    def text(self) -> str:
        """The selection as text, with its constraints if there are any."""
        amount = f"{float(self.ratio):.4g} of the {BUDGETS[self.of]}"
        parts = [self.estimator, amount, f"{self.scope} scope"]
        parts += [f"by {self.granularity}", self.structure]
        return ", ".join([*parts, *self._constraints()])

    @property
    def rules_text(self) -> str:
        """The same without the ratio: the label of a curve over the ratio."""
        parts = [self.estimator, self.scope, f"by {self.granularity}", self.structure]
        if self.of != "atoms":
            parts.append(f"of the {BUDGETS[self.of]}")
        return ", ".join([*parts, *self._constraints()])

    def _constraints(self) -> list[str]:
        """The constraints on widths and layers, as text."""
        parts = []
        if self.step > 1:
            parts.append(f"multiples of {self.multiple}")
        if self.min_atoms:
            parts.append(f"at least {self.min_atoms} atoms each")
        if self.exclude_layers:
            excluded = ", ".join(map(str, self.exclude_layers))
            parts.append(f"layers {excluded} not pruned")
        return parts

    def _repr_html_(self) -> str:
        return card_html("Selection", {"atoms": self.text})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for files and manifests; `from_dict` reads it."""
        plain = dataclasses.asdict(self)
        plain["ratio"] = float(self.ratio)
        plain["estimator_options"] = dict(self.estimator_options)
        plain["exclude_layers"] = list(self.exclude_layers)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The selection that `to_dict` wrote.

        Raises:
            SpecError: there is no ratio, or a field is unknown or has an invalid value.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        given = dict(plain)
        used = [k for k, v in _REMOVED.items() if given.pop(k, v) != v]
        used += [
            f"{k} {given[k]!r}" for k, v in _REMOVED_VALUES.items() if given.get(k) in v
        ]
        if used:
            raise SpecError(
                f"{', '.join(used)} of the selection was a setting of an earlier "
                "heapr-lab: select without it, use the mask itself, or select with "
                "that version (`git checkout ad73bb64` in a clone of the repository)"
            )
        check_names(given, names, of="a selection", noun="field")
        if "ratio" not in given:
            got = ", ".join(sorted(given)) or "none"
            raise SpecError(f"of a selection's fields ratio is required; got {got}")
        return cls(**given)


def fields_given(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not the defaults, and those without one."""
    return {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(record)
        if getattr(record, field.name) != field.default
    }


def selection_of(selection: Any, given: Mapping[str, Any]) -> Selection:
    """The selection that a caller gave: as such, as its ratio, or by its fields.

    Args:
        selection: a `Selection`, a ratio, or None.
        given: the (other) fields.

    Raises:
        SpecError: there is no ratio, or a field has an invalid value.
        TypeError: both a selection and fields are given, or a field is unknown.
    """
    if isinstance(selection, Selection):
        if given:
            raise TypeError(f"give a Selection or its fields, not both: {[*given]}")
        return selection
    if selection is not None:
        return Selection(selection, **given)
    if "ratio" not in given:
        raise SpecError("no ratio is given: select(table, ratio=0.25), for example")
    return Selection(**given)


def _shortest(exact: Fraction, value: Any) -> Any:
    """`exact` as a float, or `value` itself where a float would change it."""
    return short if Fraction(str(short := float(exact))) == exact else value
