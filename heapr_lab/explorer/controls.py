"""The controls of the panel: everything that a choice consists of, each with a name."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import ipywidgets as ipw

from heapr_lab.estimators import ESTIMATORS
from heapr_lab.selection import default_multiple
from heapr_lab.sessions import Choice
from heapr_lab.specs import SpecError
from heapr_lab.table import ImportanceTable

_LARGEST_RATIO: Final = 0.99
_STRUCTURES = ("ragged", "aligned", "per_layer", "uniform")
_BUDGETS = {
    "atoms": "atoms",
    "parameters": "model",
    "bytes": "bytes",
    "FLOPs": "flops",
}
TARGET = "target Δloss"
"""The budget that is solved for, from predictions."""


class Controls(ipw.VBox):
    """Slider, boxes and lists that a `Choice` is set with.

    Attributes:
        rise: nats per token that a target loss allows.
    """

    def __init__(
        self, table: ImportanceTable, choice: Choice, on_change: Callable[[], None]
    ) -> None:
        """Show `choice`.

        Args:
            table: what is selected from; it says which estimators there are.
            choice: to begin with.
            on_change: called whenever a control was moved.
        """
        self._on_change = on_change
        self._silent = False
        self._wished_scope = choice.scope
        self._widest = max(size for _, size in table.shapes().values())
        self._default = default_multiple(table)
        self._build_amount(choice)
        self._build_rules(table.estimators, choice)
        super().__init__(
            [
                ipw.HBox([self.slider, self.ratio, self.budget, self.rise]),
                ipw.HBox([self.estimator, self.scope, self.granularity]),
                ipw.HBox([self.structure, self.multiple, self.floor, self.whole]),
            ]
        )
        for row in self.children:
            row.layout.flex_flow = "row wrap"
        self._lock()
        moved = (self.ratio, self.budget, self.estimator, self.scope, self.granularity)
        more = (self.structure, self.multiple, self.floor, self.whole, self.rise)
        for control in (*moved, *more):
            control.observe(self._changed, names="value")

    def _build_amount(self, choice: Choice) -> None:
        limits = {"min": 0.0, "max": _LARGEST_RATIO, "step": 0.01}
        self.slider = ipw.FloatSlider(
            choice.ratio, description="ratio", readout=False, **limits
        )
        # The slider has no name that a screen reader could say; the box has.
        self.ratio = ipw.BoundedFloatText(
            choice.ratio, description="ratio", layout={"width": "170px"}, **limits
        )
        # A slider's steps add up to 0.30000000000000004, which the box would show.
        rounded = (lambda value: round(value, 6),) * 2
        ipw.link((self.slider, "value"), (self.ratio, "value"), transform=rounded)
        shown = {of: name for name, of in _BUDGETS.items()}[choice.of]
        self.budget = _dropdown("budget", (*_BUDGETS, TARGET), shown)
        self.rise = ipw.BoundedFloatText(
            0.05, min=0.0, max=10.0, step=0.01, description="Δloss ≤",
            layout={"width": "170px"}, disabled=True,
        )  # fmt: skip

    def _build_rules(self, estimators: Sequence[str], choice: Choice) -> None:
        self.estimator = _dropdown("estimator", estimators, choice.estimator)
        self.scope = _dropdown("scope", ("global", "layer"), choice.scope)
        self.granularity = _dropdown(
            "granularity", ("atom", "expert"), choice.granularity
        )
        self.structure = _dropdown("structure", _STRUCTURES, choice.structure)
        self.multiple = ipw.BoundedIntText(
            choice.multiple or self._default, min=1, max=self._widest,
            description="multiple", layout={"width": "170px"},
        )  # fmt: skip
        self.floor = ipw.BoundedIntText(
            choice.min_atoms, min=0, max=self._widest, description="floor",
            tooltip="atoms that every expert keeps", layout={"width": "170px"},
        )  # fmt: skip
        self.whole = ipw.Text(
            ", ".join(map(str, choice.exclude_layers)), description="keep layers",
            placeholder="such as 0, 5-7", continuous_update=False,
            tooltip="layers that stay whole", layout={"width": "240px"},
        )  # fmt: skip

    @property
    def choice(self) -> Choice:
        """What the controls say.

        Raises:
            SpecError: the text of layers cannot be read.
        """
        structure = self.structure.value
        ragged = structure == "ragged"
        return Choice(
            ratio=round(self.ratio.value, 6),
            estimator=self.estimator.value,
            scope=self._wished_scope,
            granularity=self.granularity.value,
            structure=structure,
            multiple=None if ragged else self.multiple.value,
            of=_BUDGETS.get(self.budget.value, "atoms"),
            min_atoms=self.floor.value,
            exclude_layers=layer_numbers(self.whole.value),
        )

    @property
    def to_target(self) -> bool:
        """Whether the ratio is to follow from a loss."""
        return bool(self.budget.value == TARGET)

    def show_scope(self, scope: str, *, fixed: bool) -> None:
        """Show the scope that is used, which some estimators fix."""
        self._quietly(self.scope, scope)
        self.scope.disabled = fixed

    def show_ratio(self, ratio: float) -> None:
        """Show the ratio that was solved for."""
        self._quietly(self.ratio, ratio)

    def _quietly(self, control: ipw.Widget, value: Any) -> None:
        self._silent = True
        try:
            control.value = value
        finally:
            self._silent = False

    def _changed(self, change: Any) -> None:
        if self._silent:  # the panel itself moved a control
            return
        if change["owner"] is self.scope:
            self._wished_scope = change["new"]
        self._lock()
        self._on_change()

    def _lock(self) -> None:
        """Disable what has no effect."""
        self.multiple.disabled = self.structure.value == "ragged"
        self.rise.disabled = not self.to_target
        self.slider.disabled = self.ratio.disabled = self.to_target


def layer_numbers(text: str) -> tuple[int, ...]:
    """Numbers and ranges of numbers, ascending.

    Raises:
        SpecError: it is something else.

    Example:
        >>> layer_numbers("5-7, 0")
        (0, 5, 6, 7)
    """
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        try:
            found |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise SpecError(
                f"cannot read {part!r} as layers: expected numbers and ranges, such as "
                "0, 5-7"
            ) from None
    return tuple(sorted(found))


def _dropdown(name: str, options: Sequence[str], value: str) -> ipw.Dropdown:
    chosen = value if value in options else options[0]
    tooltip = "\n".join(
        f"{option}: {ESTIMATORS[option].description}"
        for option in options
        if option in ESTIMATORS
    )
    return ipw.Dropdown(
        options=list(options),
        value=chosen,
        description=name,
        tooltip=tooltip or name,
        layout={"width": "240px"},
    )
