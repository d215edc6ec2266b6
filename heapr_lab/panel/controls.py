"""The controls of the panel: for a selection, and for how its weights are made."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import ipywidgets as ipw
import numpy as np

from heapr_lab.errors import SpecError, number_to
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.glossary import label_of
from heapr_lab.panel.looks import WHOLE_LABEL, beside, line, one_of, slider
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.options import (
    BUDGETS,
    CHOICES,
    Selection,
    parse_layers,
    read_ratio,
)
from heapr_lab.pruning.selection import default_multiple
from heapr_lab.recipes.weights import DEFAULT, METHODS, WeightRecipe

_LAST_STEP: Final = 99
_MOST_RISE: Final = 10.0
"""The largest Δloss that can be a target [nats per token]."""
_BUDGETS = {name: key for key, name in BUDGETS.items()}
TARGET = "target Δloss"
"""The budget whose ratio is found by measuring losses."""
_SHOWN = (
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
_WEIGHTS = {
    "unchanged": "as the paper (masked)",
    "compensated": "compensated (one forward pass)",
    "compress": f"best (about {WeightRecipe('compress').n_passes} forward passes)",
}


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
            width: the width of box and label.
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
        if self.value % 1 or not self.least <= self.value <= self.most:
            raise SpecError(
                f"{label_of(self)} is {self.value:g}, expected a whole number from "
                f"{self.least} to {self.most}"
            )
        return int(self.value)


def shown_by(control: ipw.Widget) -> Any:
    """The value of a control, a whole number of a `NumberBox`.

    Raises:
        SpecError: it is not one that the control takes.
    """
    return control.number if isinstance(control, NumberBox) else control.value


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


class Controls(ipw.VBox):
    """The boxes and lists that set a `Selection`.

    Attributes:
        slider: the slider of the ratio, and its box `ratio`; the panel lays them out.
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
        self._wished_ratio = ""
        self._build_amount(selection)
        self._build_rules(table, selection)
        super().__init__(
            [
                beside(self.estimator, self.scope, self.granularity),
                beside(self.structure, self.multiple, self.min_atoms, self.excluded),
                beside(self.budget, self.rise),
            ]
        )
        self._lock()
        for name in (*_SHOWN, "rise"):
            getattr(self, name).observe(self._changed, names="value")

    def _build_amount(self, selection: Selection) -> None:
        # In per cent: of a fraction the browser rounds the last digit differently, and
        # reports that as a change.
        self.slider = ipw.IntSlider(
            min=0, max=_LAST_STEP, description="ratio",
            readout=False, layout={"width": "240px"},
        )  # fmt: skip
        # The ratio is the one in the box; the slider shows the nearest of its steps.
        self.ratio = line("ratio", ratio_text(selection.ratio), width="150px")
        ipw.link(
            (self.ratio, "value"),
            (self.slider, "value"),
            (self._step_of, lambda step: ratio_text(step / 100)),
        )
        self.budget = _dropdown("budget", (*_BUDGETS, TARGET), BUDGETS[selection.of])
        self.rise = ipw.FloatText(
            0.05, step=0.01, description="Δloss ≤",
            layout={"width": "170px"}, disabled=True,
        )  # fmt: skip

    def _build_rules(self, table: ImportanceTable, selection: Selection) -> None:
        self.estimator = _dropdown("estimator", table.estimators, selection.estimator)
        self.scope, self.granularity, self.structure = (
            _dropdown(name, CHOICES[name], getattr(selection, name))
            for name in ("scope", "granularity", "structure")
        )
        ragged = selection.structure == "ragged"
        multiple = default_multiple(table) if ragged else selection.step
        widest = max(size for _, size in table.shapes().values())
        self.multiple = NumberBox(
            "multiple", multiple, least=1, most=widest, width="170px"
        )
        self.min_atoms = NumberBox(
            "min atoms per expert", selection.min_atoms, least=0, most=widest
        )
        excluded = ", ".join(map(str, selection.exclude_layers))
        self.excluded = line(
            "layers not pruned", excluded, width="270px", hint="such as 0, 5-7"
        )

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
    def target(self) -> float:
        """The largest Δloss that is allowed, in nats per token.

        Raises:
            SpecError: it is below 0, or too large to be one.
        """
        return number_to(_MOST_RISE, self.rise.value, name=label_of(self.rise))

    def check_shows(self, selection: Selection) -> None:
        """Make sure that this is the selection that the controls show.

        Raises:
            SpecError: a part of it has no control, or the table lacks its estimator.
        """
        shown = self.selection
        same = replace(shown, multiple=selection.multiple) == selection
        if not same or shown.step != selection.step:
            raise SpecError(
                f"the panel would show {shown!r} for {selection!r}: it has no control "
                "for a part of it, or the table no columns for its estimator; give a "
                "selection without that part"
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
        if change["owner"] is self.budget:
            self._keep_ratio(change)
        self._lock()
        self._on_change()

    def _keep_ratio(self, change: Any) -> None:
        """Note the ratio while there is a target, and show it again afterwards."""
        if change["new"] == TARGET:
            self._wished_ratio = self.ratio.value
        elif change["old"] == TARGET:
            self._quietly(self.ratio, self._wished_ratio)

    def _step_of(self, text: str) -> int:
        """The step of the slider nearest to a ratio; as it is, if the text is none."""
        with contextlib.suppress(SpecError):  # reported when the selection is read
            return min(_LAST_STEP, round(100 * read_ratio(text)))
        return int(self.slider.value)

    def _lock(self) -> None:
        """Disable the controls without effect."""
        self.multiple.disabled = self.structure.value == "ragged"
        self.rise.disabled = not self.to_target
        self.slider.disabled = self.ratio.disabled = self.to_target


def ratio_text(ratio: float) -> str:
    """A ratio as the box shows it: the shortest decimal of the float."""
    return np.format_float_positional(float(ratio), trim="-")


def _dropdown(name: str, options: Sequence[str], value: str) -> ipw.Dropdown:
    box = ipw.Dropdown(options=options, description=name, layout={"width": "240px"})
    box.value = value if value in options else options[0]
    return box


class WeightsBar(ipw.HBox):
    """How the kept weights are made; Evaluate, Compare and Export follow it.

    Attributes:
        weights: how they are made, a name in `WEIGHTS`; the panel lays it out.
        own: self-generated windows, in per cent of the corpus.
    """

    def __init__(self, session: PruningSession) -> None:
        """Show masked weights, whose mask is known; a table alone has no others.

        Args:
            session: its `recipe` is set.
        """
        self._session = session
        options = [(text, name) for name, text in _WEIGHTS.items()]
        self.weights = one_of("weights", options, width="320px")
        self.weights.layout.display = None if session.workbench else "none"
        share = session.calibration.own_text or METHODS[DEFAULT].recipe.own_text
        self._default = round(100 * share)
        self.own = slider("own text [%]", self._default, most=100, step=5)
        super().__init__([self.own], layout={"display": self.weights.layout.display})
        self._apply()
        for control in (self.weights, self.own):
            control.observe(self._apply, names="value")

    @property
    def is_unusual(self) -> bool:
        """Whether another share of self-generated text is used than by default."""
        return not self.own.disabled and self.own.value != self._default

    def show(self, recipe: WeightRecipe) -> None:
        """Show the recipe of a session that was opened."""
        self.weights.value = recipe.weights
        if recipe.chooses:
            self.own.value = round(100 * recipe.own_text)

    def _apply(self, _change: Any = None) -> None:
        recipe = WeightRecipe(self.weights.value)
        self.own.disabled = not recipe.chooses
        share = self.own.value / 100 if recipe.chooses else 0.0
        self._session.recipe = replace(recipe, own_text=share)
