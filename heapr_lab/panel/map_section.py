"""The section with the map of experts: one number for each, and the chosen expert.

The map is drawn by `expert_map`, from numbers of `expert_values`. Importing this needs
no torch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import ipywidgets as ipw
import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.importance.estimators import unit_of
from heapr_lab.panel.atom_contexts import find_contexts
from heapr_lab.panel.controls import NumberBox, check_value, offer, said_by
from heapr_lab.panel.expert_html import expert_html, layer_html
from heapr_lab.panel.expert_map import (
    ExpertMap,
    color_limits,
    descending,
    kept_share,
    rows_of,
    summed,
    traffic,
)
from heapr_lab.panel.jobs import Report, ResultJob
from heapr_lab.panel.looks import WHOLE_LABEL, alert, beside
from heapr_lab.panel.session import Pin, PruningSession
from heapr_lab.panel.session_file import Mapped

KEPT: Final = "kept share"
TRAFFIC: Final = "traffic"
MASS: Final = "score mass"
DIFFERENCE: Final = "difference to a pin"
NUMBERED: Final = "as numbered"
BY_VALUE: Final = "by value"
BY_TRAFFIC: Final = "by traffic"
_NOTHING_PINNED: Final = "none: Pin, in Compare, saves the current selection"


class MapSection(ipw.VBox):
    """A map of all experts, the numbers of a layer as a table, and one expert.

    Attributes:
        map: the widget; its `selected` is the chosen expert.
        layer: box with the layer of the chosen expert, and `expert` with its number.
        contexts: the last result of `activations.top_contexts` for an expert.
    """

    contexts: pd.DataFrame | None = None

    def __init__(
        self,
        session: PruningSession,
        *,
        pins: Callable[[], Sequence[Pin]] = tuple,
        choose: Callable[[int, int, int], None] = lambda *_: None,
    ) -> None:
        """Lay the section out.

        Args:
            session: whose table and mask are shown.
            pins: those that the mask can be compared with.
            choose: told of layer, expert, and its atom of the highest score, when an
                expert is chosen.
        """
        self.session = session
        self._pins, self._choose = pins, choose
        self._linking = False
        """Whether boxes or map are being set, and not by a person."""
        # What does not follow the ratio is computed once.
        counted = "tokens" in session.table.frame
        self._traffic = traffic(session.table) if counted else None
        self._mass = functools.lru_cache(maxsize=1)(self._mass_of)
        self._keep_of = functools.lru_cache(maxsize=1)(session.keep_of)
        self._build_controls()
        self._build_views()
        super().__init__(self._rows())
        for control in (self.variable, self.pin, self.order):
            control.observe(self.refresh, names="value")
        self.map.observe(self._take_cell, names="selected")
        for box in (self.layer, self.expert):
            box.observe(self._take_boxes, names="value")

    # --- layout -----------------------------------------------------------------

    def _build_controls(self) -> None:
        few = [] if self._traffic is None else [TRAFFIC]
        self.variable = _dropdown("map of", [KEPT, *few, MASS, DIFFERENCE])
        orders = [NUMBERED, BY_VALUE, *([BY_TRAFFIC] if few else [])]
        self.order = _dropdown("order of experts", orders)
        self.pin = _dropdown("pin of the map", [(_NOTHING_PINNED, None)])
        shapes = self.session.table.shapes()
        n_experts = max(count for count, _ in shapes.values())
        limits: dict[str, Any] = {"least": min(shapes), "most": max(shapes)}
        self.layer = NumberBox("layer of the expert", min(shapes), **limits)
        self.expert = NumberBox("number of the expert", 0, least=0, most=n_experts - 1)

    def _build_views(self) -> None:
        self.map = ExpertMap(layout={"flex": "1 1 440px", "min_width": "0"})
        narrow = {"flex": "0 1 auto", "max_width": "100%", "margin": "0 0 0 16px"}
        self.experts = ipw.HTML(layout=narrow)
        wrap = {"flex_flow": "row wrap", "align_items": "flex-start"}
        self.view = ipw.HBox([self.map, self.experts], layout=wrap)
        self.note, self.card = ipw.HTML(), ipw.HTML()
        self.show_contexts = ResultJob(
            "Show contexts of the expert",
            self._contexts,
            asked=lambda: (self.layer.number, self.expert.number),
            of=lambda: said_by(self.layer, self.expert),
            tooltip="tokens of the calibration corpus that the router sends to the "
            "expert with the largest weights",
        )
        self.show_contexts.button.layout.width = "auto"

    def _rows(self) -> list[ipw.Widget]:
        rows = [
            beside(self.variable, self.pin, self.order),
            self.note,
            self.view,
            beside(self.layer, self.expert),
            self.card,
        ]
        if self.session.workbench is not None:
            rows.append(self.show_contexts)
        return rows

    # --- what follows the selection and the controls ----------------------------------

    def refresh(self, _change: Any = None) -> None:
        """Show the current selection; nothing is shown if it is infeasible."""
        self._offer_pins()
        self.card.value = self.experts.value = ""
        try:
            self._show_map()
        except SpecError as error:
            self.note.value = alert(str(error))
            self.view.layout.display = "none"
            return
        self.view.layout.display = None
        try:
            self._show_expert(*self._place)
        except SpecError as error:  # there is none
            self._mark(None)
            self.card.value = alert(str(error))
        self.show_contexts.check()

    def _offer_pins(self) -> None:
        """Offer the pins there are; the chosen one stays chosen if it is among them."""
        pins = self._pins()
        options: list[tuple[str, int | None]] = [(_NOTHING_PINNED, None)]
        if pins:
            options = [(pin.label, number) for number, pin in enumerate(pins)]
        if tuple(options) != self.pin.options:
            offer(self.pin, options)
        shown = self.variable.value == DIFFERENCE
        self.pin.layout.display = None if shown else "none"

    def _show_map(self) -> None:
        values, title = self._values()
        self._drawn, self._columns = values, self._ordered(values)
        self.map.show(
            values,
            layers=list(self.session.table.shapes()),
            title=title,
            limits=self._limits(values),
            percent=self.variable.value in (KEPT, DIFFERENCE),
            order=None if self.order.value == NUMBERED else self._columns,
        )
        self.note.value = ""

    def _values(self) -> tuple[np.ndarray, str]:
        """What the map shows, (layers, experts), and what it is.

        Raises:
            SpecError: the selection is infeasible, or nothing is pinned.
        """
        table, variable = self.session.table, self.variable.value
        estimator = self.session.selection.estimator
        if variable == TRAFFIC and self._traffic is not None:
            return self._traffic, f"{TRAFFIC} [× even share]"
        if variable == MASS:
            return self._mass(estimator), f"{MASS}, {estimator} [{unit_of(estimator)}]"
        kept = kept_share(table, self.session.keep)
        if variable == KEPT:
            return kept, f"{KEPT} of the atoms"
        pin = self._pinned()
        before = kept_share(table, self._keep_of(pin.selection, pin.recipe))
        return kept - before, f"{KEPT}, minus that of pin {pin.label}"

    def _pinned(self) -> Pin:
        if self.pin.value is None:
            raise SpecError(
                "nothing is pinned, so there is no difference: Pin, in Compare, saves "
                "the current selection"
            )
        found: Pin = self._pins()[self.pin.value]
        return found

    def _limits(self, values: np.ndarray) -> tuple[float, float]:
        if self.variable.value == KEPT:
            return 0.0, 1.0
        return color_limits(values, diverging=self.variable.value == DIFFERENCE)

    def _ordered(self, values: np.ndarray) -> np.ndarray:
        """The experts of each layer from left to right, (layers, experts)."""
        if self.order.value == NUMBERED:
            return np.broadcast_to(np.arange(values.shape[1]), values.shape)
        by = self._traffic if self.order.value == BY_TRAFFIC else values
        return descending(values if by is None else by)

    # --- in a session's file ----------------------------------------------------------

    @property
    def state(self) -> Mapped:
        """What `show_state` shows again."""
        return Mapped(
            self.variable.value,
            self.order.value,
            self.pin.value or 0,
            self.layer.number,
            self.expert.number,
        )

    def check_state(self, state: Mapped, *, n_pins: int) -> None:
        """Check that the controls can have these values, with so many pins.

        Raises:
            SpecError: one cannot.
        """
        for name in ("variable", "order", "layer", "expert"):
            check_value(getattr(self, name), getattr(state, name))
        if not 0 <= state.pin <= max(0, n_pins - 1):
            raise SpecError(f"pin of the map is {state.pin}, of {n_pins} pins")

    def show_state(self, state: Mapped) -> None:
        """Show what a session has; the atom that is looked at stays."""
        self._offer_pins()
        self._linking = True
        self.variable.value, self.order.value = state.variable, state.order
        self.layer.value, self.expert.value = state.layer, state.expert
        if self._pins():
            self.pin.value = state.pin
        self._linking = False
        self.refresh()

    # --- the chosen expert ------------------------------------------------------------

    def _take_cell(self, change: Any) -> None:
        """Put the cell that was chosen into the boxes."""
        if change["new"] is not None and not self._linking:
            self._linking = True
            self.layer.value, self.expert.value = change["new"]
            self._linking = False
            self._take_boxes()

    def _take_boxes(self, _change: Any = None) -> None:
        """Show the expert in the boxes, and have its best atom looked at."""
        if self._linking:
            return
        self.refresh()
        if self.experts.value:  # there is one, and the selection is feasible
            place = self._place
            self._choose(*place, int(np.argmax(self._scores(*place))))

    def _mark(self, place: list[int] | None) -> None:
        """Outline an expert in the map."""
        self._linking = True
        self.map.selected = place
        self._linking = False

    @property
    def _place(self) -> tuple[int, int]:
        """Layer and number of the chosen expert.

        Raises:
            SpecError: there is none.
        """
        layer, expert = self.layer.number, self.expert.number
        count, _ = self.session.table.shapes().get(layer, (0, 0))
        if expert >= count:
            raise SpecError(
                f"there is no expert {expert} in layer {layer}: choose a cell"
            )
        return layer, expert

    def _scores(self, layer: int, expert: int) -> np.ndarray:
        """Of the atoms of an expert, (I,)."""
        scores = self.session.table.scores(self.session.selection.estimator)
        return scores[rows_of(self.session.table, layer, expert)]

    def _show_expert(self, layer: int, expert: int) -> None:
        self._mark([layer, expert])
        row = list(self.session.table.shapes()).index(layer)
        self.experts.value = self._table(row, layer, expert)
        self.card.value = expert_html(
            f"Layer {layer}, expert {expert}",
            self._scores(layer, expert),
            self.session.keep.by_layer(layer)[expert],
            facts=self._facts(row, expert),
            unit=unit_of(self.session.selection.estimator),
        )

    def _facts(self, row: int, expert: int) -> str:
        """Traffic and score mass of an expert, given the row of its layer."""
        mass = self._mass(self.session.selection.estimator)[row]
        rank = 1 + int((mass > mass[expert]).sum())
        said = (
            f"Its scores sum to {mass[expert]:.3g}, rank {rank} of "
            f"{np.isfinite(mass).sum()} in the layer."
        )
        if self._traffic is None:
            return said
        return f"Traffic {self._traffic[row, expert]:.2f} × even share. {said}"

    def _table(self, row: int, layer: int, expert: int) -> str:
        """The numbers of one layer, in the order of the map."""
        table = self.session.table
        found = [(KEPT, kept_share(table, self.session.keep), "{:.1%}")]
        if self._traffic is not None:
            found.append((TRAFFIC, self._traffic, "{:.2f}"))
        mass = self._mass(self.session.selection.estimator)
        found.append((MASS, mass, "{:.3g}"))
        if self.variable.value == DIFFERENCE:
            found.append((DIFFERENCE, self._drawn, "{:+.1%}"))
        text = {name: [*map(form.format, own[row])] for name, own, form in found}
        count, _ = table.shapes()[layer]
        experts = [one for one in self._columns[row].tolist() if one < count]
        return layer_html(layer, experts, text, chosen=expert)

    def _mass_of(self, estimator: str) -> np.ndarray:
        """Summed scores of each expert, (layers, experts)."""
        return summed(self.session.table, self.session.table.scores(estimator))

    # --- what the button starts -------------------------------------------------------

    def _contexts(self, report: Report, asked: tuple[int, int]) -> str:
        place = dict(zip(("layer", "expert"), asked, strict=True))
        bench = self.session.workbench
        assert bench is not None  # without one there is no button
        self.contexts, view = find_contexts(
            bench, self.session.calibration, place, report, said="of the dense model"
        )
        return view


def _dropdown(name: str, options: Sequence[Any]) -> ipw.Dropdown:
    return ipw.Dropdown(
        options=options,
        description=name,
        style=WHOLE_LABEL,
        layout={"width": "auto", "max_width": "420px"},
    )
