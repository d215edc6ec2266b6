"""The switch of how weights are made, for evaluations and for what is exported."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ipywidgets as ipw

from heapr_lab.panel.controls import WHOLE_LABEL
from heapr_lab.panel.session import PASSES, PruningSession, Way
from heapr_lab.recipes.presets import DEFAULT, METHODS

_CHOICES = {
    "unchanged": "as the paper (masked)",
    "compensated": "compensated (one forward pass)",
    "compress": f"best (about {PASSES['compress']} forward passes)",
}


class WeightsBar(ipw.HBox):
    """How the weights that stay are made; Evaluate, Compare and Export follow it.

    Attributes:
        weights: the way, a name in `presets.WEIGHTS`; the panel lays it out.
        own: windows that the model writes itself, in per cent of the corpus.
    """

    def __init__(self, session: PruningSession, on_change: Callable[[], None]) -> None:
        """Show masked weights, whose mask is known; a table alone has no others.

        Args:
            session: whose `way` is set.
            on_change: called whenever it has changed.
        """
        self._session, self._on_change = session, on_change
        self.weights = ipw.Dropdown(
            options=[(text, name) for name, text in _CHOICES.items()],
            description="weights",
            style=WHOLE_LABEL,
            layout={"width": "290px", "display": None if session.workbench else "none"},
        )
        share = session.calibration.own_text or METHODS[DEFAULT].own_text
        self.own = ipw.IntSlider(
            round(100 * share), 0, 100, 5, description="own text [%]",
            continuous_update=False, style=WHOLE_LABEL,
        )  # fmt: skip
        super().__init__([self.own], layout={"display": self.weights.layout.display})
        self._apply()
        for control in (self.weights, self.own):
            control.observe(self._changed, names="value")

    def show(self, way: Way) -> None:
        """Show the way of a session that was opened."""
        self.weights.value = way.weights
        if way.chooses:
            self.own.value = round(100 * way.own_text)

    def _changed(self, _change: Any) -> None:
        self._apply()
        self._on_change()

    def _apply(self) -> None:
        way = Way(self.weights.value)
        self.own.disabled = not way.chooses
        share = self.own.value / 100 if way.chooses else 0.0
        self._session.way = replace(way, own_text=share)
