"""The switch of how weights are made, for evaluations and for what is exported."""

from collections.abc import Callable
from typing import Any

import ipywidgets as ipw

from heapr_lab.panel.controls import WHOLE_LABEL
from heapr_lab.panel.session import PruningSession, Way
from heapr_lab.recipes.presets import DEFAULT, METHODS, WEIGHTS

_CHOICES = {
    "compress": "compensated where it helps (about 5 forward passes)",
    "compensated": "compensate W_down (one forward pass)",
    "unchanged": "unchanged, masked as HEAPr",
}


class WeightsBar(ipw.HBox):
    """How the weights that stay are made; Evaluate, Compare and Export follow it.

    Attributes:
        weights: the way, a name in `presets.WEIGHTS`.
        own: windows that the model writes itself, in per cent of the corpus.
    """

    def __init__(self, session: PruningSession, on_change: Callable[[], None]) -> None:
        """Show the command line's default; a table alone has no weights to choose.

        Args:
            session: whose `way` is set.
            on_change: called whenever it has changed.
        """
        self._session, self._on_change = session, on_change
        self.weights = ipw.Dropdown(
            options=[(_CHOICES[name], name) for name in WEIGHTS],
            value=METHODS[DEFAULT].weights,
            description="weights",
            layout={"width": "480px"},
        )
        share = session.calibration.own_text or METHODS[DEFAULT].own_text
        self.own = ipw.IntSlider(
            round(100 * share), 0, 100, 5, description="own text [%]",
            continuous_update=False, style=WHOLE_LABEL,
        )  # fmt: skip
        without = session.workbench is None
        super().__init__(
            [self.weights, self.own],
            layout={"flex_flow": "row wrap", "display": "none" if without else None},
        )
        if not without:
            self._apply()
        for control in (self.weights, self.own):
            control.observe(self._changed, names="value")

    def show(self, way: Way) -> None:
        """Show the way of a session that was opened."""
        self.weights.value = way.weights
        if way.weights == "compress":
            self.own.value = round(100 * way.own_text)

    def _changed(self, _change: Any) -> None:
        self._apply()
        self._on_change()

    def _apply(self) -> None:
        compress = self.weights.value == "compress"
        self.own.disabled = not compress
        share = self.own.value / 100 if compress else 0.0
        self._session.way = Way(self.weights.value, share)
