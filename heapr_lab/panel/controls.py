"""The controls of the panel: a labelled control for each setting of a selection."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import ipywidgets as ipw

from heapr_lab.errors import SpecError
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.help import label_of
from heapr_lab.panel.looks import beside
from heapr_lab.pruning.options import (
    BUDGETS,
    CHOICES,
    Selection,
    parse_layers,
    read_ratio,
)
from heapr_lab.pruning.selection import default_multiple

_LAST_STEP: Final = 99
_BUDGETS = {name: of for of, name in BUDGETS.items()}
TARGET = "target Δloss"
"""The budget whose ratio is found by measuring losses."""
_SHOWN = (
    "slider",
    "ratio",
    "budget",
    "estimator",
    "scope",
    "granularity",
    "structure",
    "multiple",
    "min_atoms",
    "excluded",
)
"""The controls of a selection."""
WHOLE_LABEL: Final = {"description_width": "initial"}
"""Style of a control whose label is longer than ipywidgets allows for."""


class NumberBox(ipw.FloatText):
    """A box for a whole number, which keeps what is typed, whether it is one or not."""

    def __init__(
        self, name: str, value: int, *, least: int, most: int, width: str = "240px"
    ) -> None:
        """Show `value`.

        Args:
            name: the label.
            value: the first number.
            least: the smallest number that is taken.
            most: the largest.
            width: of box and label.
        """
        self.least, self.most = least, most
        super().__init__(
            value, description=name, style=WHOLE_LABEL, layout={"width": width}
        )

    @property
    def number(self) -> int:
        """The number that is shown.

        Raises:
            SpecError: it is not whole, or not from `least` to `most`.
        """
        check_value(self, self.value)
        return int(self.value)


def shown_by(control: ipw.Widget) -> Any:
    """The value of a control, a whole number of a `NumberBox`.

    Raises:
        SpecError: it is not one that the control takes.
    """
    return control.number if isinstance(control, NumberBox) else control.value


def said_by(*controls: ipw.Widget) -> str:
    """The labels and values of controls, as text.

    Raises:
        SpecError: as `shown_by`.
    """
    return ", ".join(f"{label_of(one)} {shown_by(one)}" for one in controls)


def offer(box: ipw.Dropdown, options: Sequence[Any], *, first: int = 0) -> None:
    """Offer other options in one message: between two, another would be chosen.

    What is chosen stays if its name is among them, else it is the one at `first`.
    """
    names = [one[0] if isinstance(one, tuple) else one for one in options]
    with box.hold_sync():
        label = box.label
        box.options = options
        box.index = names.index(label) if label in names else min(first, len(names) - 1)


def several_of(
    name: str, options: Sequence[str], value: Sequence[str]
) -> ipw.SelectMultiple:
    """A list of options of which several can be chosen."""
    return ipw.SelectMultiple(
        options=list(options),
        value=list(value),
        rows=min(5, max(2, len(options))),
        description=name,
    )


def check_value(control: ipw.Widget, value: Any) -> None:
    """Make sure that a list or a box for numbers can show a value.

    Raises:
        SpecError: it cannot.
    """
    if isinstance(control, NumberBox):
        fits = value % 1 == 0 and control.least <= value <= control.most
        shown = f"{value:g}"
        expected = f"a whole number from {control.least} to {control.most}"
    else:
        fits, shown = value in control.options, repr(value)
        expected = f"one of {', '.join(control.options)}"
    if not fits:
        raise SpecError(f"{label_of(control)} is {shown}, expected {expected}")


class Controls(ipw.VBox):
    """The boxes and lists that set a `Selection`.

    Attributes:
        slider: of the ratio, and its box `ratio`; the panel lays them out.
        rise: the largest Δloss, in nats per token, that the target allows.
    """

    def __init__(
        self,
        table: ImportanceTable,
        selection: Selection,
        on_change: Callable[[], None],
    ) -> None:
        """Show `selection`.

        Args:
            table: the importance table, which decides on the estimators offered.
            selection: the first one.
            on_change: called whenever a control has changed.
        """
        self._on_change = on_change
        self._silent = False
        self._wished_scope = selection.scope
        self._widest = max(size for _, size in table.shapes().values())
        self._default = default_multiple(table)
        self._build_amount(selection)
        self._build_rules(table.estimators, selection)
        super().__init__(
            [
                beside(self.estimator, self.scope, self.granularity),
                beside(self.structure, self.multiple, self.min_atoms, self.excluded),
                beside(self.budget, self.rise),
            ]
        )
        self._lock()
        self.slider.observe(self._slid, names="value")
        for name in (*_SHOWN[1:], "rise"):
            getattr(self, name).observe(self._changed, names="value")

    def _build_amount(self, selection: Selection) -> None:
        # In per cent: of a fraction the browser rounds the last digit differently, and
        # reports that as a change.
        self.slider = ipw.IntSlider(
            _on_slider(selection.ratio), min=0, max=_LAST_STEP, description="ratio",
            readout=False, layout={"width": "240px"},
        )  # fmt: skip
        # The ratio is the one in the box; the slider shows the nearest of its steps.
        self.ratio = ipw.Text(
            ratio_text(selection.ratio), description="ratio", continuous_update=False,
            layout={"width": "150px"},
        )  # fmt: skip
        self.budget = _dropdown("budget", (*_BUDGETS, TARGET), BUDGETS[selection.of])
        self.rise = ipw.BoundedFloatText(
            0.05, min=0.0, max=10.0, step=0.01, description="Δloss ≤",
            layout={"width": "170px"}, disabled=True,
        )  # fmt: skip

    def _build_rules(self, estimators: Sequence[str], selection: Selection) -> None:
        self.estimator = _dropdown("estimator", estimators, selection.estimator)
        self.scope = _dropdown("scope", CHOICES["scope"], selection.scope)
        self.granularity = _dropdown(
            "granularity", CHOICES["granularity"], selection.granularity
        )
        self.structure = _dropdown(
            "structure", CHOICES["structure"], selection.structure
        )
        multiple, widest = selection.multiple or self._default, self._widest
        self.multiple = NumberBox(
            "multiple", multiple, least=1, most=widest, width="170px"
        )
        self.min_atoms = NumberBox(
            "min atoms per expert", selection.min_atoms, least=0, most=widest
        )
        self.excluded = ipw.Text(
            ", ".join(map(str, selection.exclude_layers)), style=WHOLE_LABEL,
            description="layers not pruned", placeholder="such as 0, 5-7",
            continuous_update=False, layout={"width": "270px"},
        )  # fmt: skip

    @property
    def selection(self) -> Selection:
        """The selection that the controls show.

        Raises:
            SpecError: what is typed of the ratio, a width or the layers is not valid.
        """
        structure = self.structure.value
        ragged = structure == "ragged"
        return Selection(
            ratio=read_ratio(self.ratio.value),
            estimator=self.estimator.value,
            scope="layer" if self.scope_is_fixed else self._wished_scope,
            granularity=self.granularity.value,
            structure=structure,
            multiple=None if ragged else self.multiple.number,
            of=_BUDGETS.get(self.budget.value, "atoms"),
            min_atoms=self.min_atoms.number,
            exclude_layers=parse_layers(self.excluded.value, name="layers not pruned"),
        )

    @property
    def are_unusual(self) -> bool:
        """Whether anything but the ratio is set otherwise than by default."""
        chosen = self.selection
        return self.to_target or chosen != Selection(chosen.ratio)

    @property
    def scope_is_fixed(self) -> bool:
        """Whether the estimator allows one scope only."""
        return ESTIMATORS[self.estimator.value].within_layer

    @property
    def to_target(self) -> bool:
        """Whether the ratio is that of a target loss."""
        return bool(self.budget.value == TARGET)

    def show(self, other: "Controls") -> None:
        """Show what `other` shows, of the same table, and tell nobody."""
        for name in _SHOWN:
            self._quietly(getattr(self, name), getattr(other, name).value)
        self._wished_scope = other._wished_scope
        self._lock()

    def show_use(self, scope: str, *, estimator: bool) -> None:
        """Show the scope in use, and whether the estimator is."""
        self._quietly(self.scope, scope)
        self.scope.disabled = estimator and self.scope_is_fixed
        self.estimator.disabled = not estimator

    def show_ratio(self, ratio: float) -> None:
        """Show a ratio that was found."""
        self._quietly(self.ratio, ratio_text(ratio))
        self._quietly(self.slider, _on_slider(ratio))

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
        if change["owner"] is self.ratio:
            self._follow_box()
        self._lock()
        self._on_change()

    def _slid(self, change: Any) -> None:
        """Copy the position of the slider to the box, which informs the panel."""
        if not self._silent:
            self.ratio.value = ratio_text(change["new"] / 100)

    def _follow_box(self) -> None:
        """Move the slider to the ratio in the box, if that is valid."""
        try:
            ratio = read_ratio(self.ratio.value)
        except SpecError:  # reported when the selection is read
            return
        self._quietly(self.slider, _on_slider(ratio))

    def _lock(self) -> None:
        """Disable the controls without effect."""
        self.multiple.disabled = self.structure.value == "ragged"
        self.rise.disabled = not self.to_target
        self.slider.disabled = self.ratio.disabled = self.to_target


def ratio_text(ratio: float) -> str:
    """A ratio as the box shows it."""
    return f"{ratio:.12g}"


def _on_slider(ratio: float) -> int:
    """The step of the slider, in per cent, that is nearest to a ratio."""
    return min(_LAST_STEP, round(100 * ratio))


def _dropdown(name: str, options: Sequence[str], value: str) -> ipw.Dropdown:
    chosen = value if value in options else options[0]
    return ipw.Dropdown(
        options=list(options),
        value=chosen,
        description=name,
        layout={"width": "240px"},
    )
