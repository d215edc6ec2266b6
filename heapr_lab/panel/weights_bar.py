"""The switch of how weights are made, for evaluations and for what is exported."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ipywidgets as ipw

from heapr_lab.panel.controls import WHOLE_LABEL
from heapr_lab.panel.session import PruningSession
from heapr_lab.recipes.presets import DEFAULT, METHODS
from heapr_lab.recipes.weights import WeightRecipe

_CHOICES = {
    "unchanged": "as the paper (masked)",
    "compensated": "compensated (one forward pass)",
    "compress": f"best (about {WeightRecipe('compress').n_passes} forward passes)",
}


class WeightsBar(ipw.HBox):
    """How the kept weights are made; Evaluate, Compare and Export follow it.

    Attributes:
        weights: how they are made, a name in `WEIGHTS`; the panel lays it out.
        own: windows that the model writes itself, in per cent of the corpus.
    """

    def __init__(self, session: PruningSession, on_change: Callable[[], None]) -> None:
        """Show masked weights, whose mask is known; a table alone has no others.

        Args:
            session: whose `recipe` is set.
            on_change: called whenever it has changed.
        """
        self._session, self._on_change = session, on_change
        self.weights = ipw.Dropdown(
            options=[(text, name) for name, text in _CHOICES.items()],
            description="weights",
            style=WHOLE_LABEL,
            layout={"width": "350px", "display": None if session.workbench else "none"},
        )
        share = session.calibration.own_text or METHODS[DEFAULT].recipe.own_text
        self.own = ipw.IntSlider(
            round(100 * share), 0, 100, 5, description="own text [%]",
            continuous_update=False, style=WHOLE_LABEL,
        )  # fmt: skip
        super().__init__([self.own], layout={"display": self.weights.layout.display})
        self._apply()
        for control in (self.weights, self.own):
            control.observe(self._changed, names="value")

    def show(self, recipe: WeightRecipe) -> None:
        """Show the recipe of a session that was opened."""
        self.weights.value = recipe.weights
        if recipe.chooses:
            self.own.value = round(100 * recipe.own_text)

    def _changed(self, _change: Any) -> None:
        self._apply()
        self._on_change()

    def _apply(self) -> None:
        recipe = WeightRecipe(self.weights.value)
        self.own.disabled = not recipe.chooses
        share = self.own.value / 100 if recipe.chooses else 0.0
        self._session.recipe = replace(recipe, own_text=share)
