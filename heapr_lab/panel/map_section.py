"""The section with the map of experts: one number for each, and the chosen expert.

Importing this needs no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import ipywidgets as ipw
import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.figures.scores import ScoreBins, bin_scores
from heapr_lab.importance.estimators import unit_of
from heapr_lab.panel.atom_contexts import find_contexts
from heapr_lab.panel.controls import (
    check_value,
    expert_box,
    layer_box,
    offer,
    said_by,
    shown_by,
)
from heapr_lab.panel.expert_map import (
    ExpertMap,
    color_limits,
    descending,
    expert_load,
    kept_share,
    rows_of,
    summed,
)
from heapr_lab.panel.jobs import Report, ResultJob
from heapr_lab.panel.looks import (
    beside,
    columns_html,
    failure,
    one_of,
    scrolling_html,
    status,
)
from heapr_lab.panel.session import Pin, PruningSession
from heapr_lab.panel.session_file import Mapped

KEPT: Final = "kept share"
LOAD: Final = "expert load"
MASS: Final = "score mass"
DIFFERENCE: Final = "difference to a pin"
NUMBERED: Final = "as numbered"
BY_VALUE: Final = "by value"
BY_LOAD: Final = "by expert load"
_SAVED: Final = {LOAD: "traffic", BY_LOAD: "by traffic"}
"""What is called otherwise in the files of sessions."""
_N_BINS: Final = 40
_WIDTH, _HEIGHT, _LINE = 440, 150, 18
"""Pixels of the bars, and of a line of text."""
_KEPT, _REMOVED = "var(--jp-ui-font-color3, #999)", "rgb(213,94,0)"
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
            session: its table and mask are shown.
            pins: the pins that the mask can be compared with.
            choose: told of layer, expert, and its atom of the highest score, when an
                expert is chosen.
        """
        self.session = session
        self._pins, self._choose = pins, choose
        self._linking = False
        """Whether boxes are being set, and not by a person."""
        counted = "tokens" in session.table.frame
        self._load = expert_load(session.table) if counted else None
        self._build_controls()
        self._build_views()
        rows = [
            beside(self.variable, self.pin, self.order),
            self.note,
            self.view,
            beside(self.layer, self.expert),
            self.card,
        ]
        super().__init__(rows + [self.show_contexts] * (session.workbench is not None))
        for control in (self.variable, self.pin, self.order):
            control.observe(self.refresh, names="value")
        self.map.observe(self._take_cell, names="selected")
        for box in (self.layer, self.expert):
            box.observe(self._take_boxes, names="value")

    # --- layout -----------------------------------------------------------------

    def _build_controls(self) -> None:
        few = [] if self._load is None else [LOAD]
        orders = [NUMBERED, BY_VALUE, *([BY_LOAD] if few else [])]
        self.variable = one_of("map of", [KEPT, *few, MASS, DIFFERENCE], width="auto")
        self.order = one_of("order of experts", orders, width="auto")
        self.pin = one_of("pin of the map", [(_NOTHING_PINNED, None)], width="auto")
        self.pin.layout.max_width = "420px"
        self.layer = layer_box("layer of the expert", self.session.table)
        self.expert = expert_box("number of the expert", self.session.table)

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
            controls=(self.layer, self.expert),
            of=lambda: said_by(self.layer, self.expert),
            tooltip="tokens of the calibration corpus that the router sends to the "
            "expert with the largest weights",
        )

    # --- what follows the selection and the controls ----------------------------------

    def refresh(self, _change: Any = None) -> None:
        """Show the current selection; nothing is shown if it is infeasible."""
        self._offer_pins()
        self.card.value = self.experts.value = ""
        try:
            self._show_map()
        except SpecError as error:
            self.note.value = failure(error)
            self.view.layout.display = "none"
            return
        self.view.layout.display = None
        try:
            self._show_expert(*self._place)
        except SpecError as error:  # there is none
            self.map.selected = None
            self.card.value = failure(error)

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
        limits = color_limits(values, diverging=self.variable.value == DIFFERENCE)
        self.map.show(
            values,
            layers=list(self.session.table.shapes()),
            title=title,
            limits=(0.0, 1.0) if self.variable.value == KEPT else limits,
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
        if variable == LOAD and self._load is not None:
            return self._load, f"{LOAD} [× even share]"
        if variable == MASS:
            return self._mass, f"{MASS}, {estimator} [{unit_of(estimator)}]"
        kept = kept_share(table, self.session.keep)
        if variable == KEPT:
            return kept, f"{KEPT} of the atoms"
        pin = self._pinned()
        before = kept_share(table, self.session.keep_of(pin.selection, pin.recipe))
        return kept - before, f"{KEPT}, minus that of pin {pin.label}"

    def _pinned(self) -> Pin:
        if self.pin.value is None:
            raise SpecError(
                "nothing is pinned, so there is no difference: Pin, in Compare, saves "
                "the current selection"
            )
        pin: Pin = self._pins()[self.pin.value]
        return pin

    def _ordered(self, values: np.ndarray) -> np.ndarray:
        """The experts of each layer from left to right, (layers, experts)."""
        if self.order.value == NUMBERED:
            return np.broadcast_to(np.arange(values.shape[1]), values.shape)
        by = self._load if self.order.value == BY_LOAD else values
        return descending(values if by is None else by)

    # --- in a session's file ----------------------------------------------------------

    @property
    def state(self) -> Mapped:
        """What `show_state` shows again."""
        shown = {
            name: shown_by(getattr(self, name)) for name in Mapped.__struct_fields__
        }
        named = {name: _SAVED.get(value, value) for name, value in shown.items()}
        return Mapped(**named | {"pin": shown["pin"] or 0})

    def check_state(self, state: Mapped, *, n_pins: int) -> None:
        """Check that the controls can have these values, with so many pins.

        Raises:
            SpecError: one cannot.
        """
        for control, value in self._restored(state):
            check_value(control, value)
        if not 0 <= state.pin <= max(0, n_pins - 1):
            raise SpecError(f"pin of the map is {state.pin}, of {n_pins} pins")

    def show_state(self, state: Mapped) -> None:
        """Show what a session has; the atom that is looked at stays."""
        self._offer_pins()
        self._linking = True
        for control, value in self._restored(state):
            control.value = value
        if self._pins():
            self.pin.value = state.pin
        self._linking = False
        self.refresh()

    def _restored(self, state: Mapped) -> Iterator[tuple[Any, Any]]:
        """The controls whose choices do not change, with their values."""
        shown = {saved: value for value, saved in _SAVED.items()}
        for name in ("variable", "order", "layer", "expert"):
            value = getattr(state, name)
            yield getattr(self, name), shown.get(value, value)

    # --- the chosen expert ------------------------------------------------------------

    def _take_cell(self, change: Any) -> None:
        """Put the cell that was chosen into the boxes."""
        if change["new"] not in (None, [self.layer.value, self.expert.value]):
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
        """The scores of an expert's atoms, (I,)."""
        scores = self.session.table.scores(self.session.selection.estimator)
        return scores[rows_of(self.session.table, layer, expert)]

    def _show_expert(self, layer: int, expert: int) -> None:
        self.map.selected = [layer, expert]
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
        """Load and score mass of an expert, given the row of its layer."""
        mass = self._mass[row]
        rank = 1 + int((mass > mass[expert]).sum())
        text = (
            f"Its scores sum to {mass[expert]:.3g}, rank {rank} of "
            f"{np.isfinite(mass).sum()} in the layer."
        )
        if self._load is None:
            return text
        return f"Load {self._load[row, expert]:.2f} × even share. {text}"

    def _table(self, row: int, layer: int, expert: int) -> str:
        """The numbers of one layer, in the order of the map."""
        table = self.session.table
        columns = [(KEPT, kept_share(table, self.session.keep), "{:.1%}")]
        if self._load is not None:
            columns.append((LOAD, self._load, "{:.2f}"))
        columns.append((MASS, self._mass, "{:.3g}"))
        if self.variable.value == DIFFERENCE:
            columns.append((DIFFERENCE, self._drawn, "{:+.1%}"))
        text = {name: [*map(form.format, grid[row])] for name, grid, form in columns}
        count, _ = table.shapes()[layer]
        experts = [number for number in self._columns[row].tolist() if number < count]
        return layer_html(layer, experts, text, chosen=expert)

    @property
    def _mass(self) -> np.ndarray:
        """Summed scores of each expert, (layers, experts)."""
        table, estimator = self.session.table, self.session.selection.estimator
        return table.memo(
            ("mass", estimator), lambda: summed(table, table.scores(estimator))
        )

    # --- what the button starts -------------------------------------------------------

    def _contexts(self, report: Report, layer: int, expert: int) -> str:
        place, bench = {"layer": layer, "expert": expert}, self.session.workbench
        assert bench is not None  # without one there is no button
        self.contexts, view = find_contexts(
            bench, self.session.calibration, place, report, said="of the dense model"
        )
        return view


# --- views ----------------------------------------------------------------------------


def expert_html(
    name: str, scores: np.ndarray, kept: np.ndarray, *, facts: str, unit: str
) -> str:
    """What is kept of an expert, and the histogram of its scores with the cut.

    Args:
        name: the name of the expert, for people.
        scores: the scores of its atoms, (I,).
        kept: which are kept, bool (I,).
        facts: what else to say about it.
        unit: the unit of the scores.
    """
    text = (
        f"{name}: {kept.sum():,} of {kept.size:,} atoms kept ({kept.mean():.1%}). "
        f"{facts} {_cut_text(scores, kept)}"
    )
    bins = bin_scores(scores, bins=_N_BINS)
    if bins.n_not_positive == len(scores):
        return status(f"{text} No score is above 0, so there is no histogram.")
    left_out = ""
    if bins.n_not_positive:
        left_out = f" Not drawn: {bins.n_not_positive:,} with a score of 0 or less."
    return status(text + left_out) + _histogram(bins, scores, kept, unit)


def layer_html(
    layer: int,
    experts: Sequence[int],
    columns: Mapping[str, Sequence[str]],
    *,
    chosen: int,
) -> str:
    """The numbers of a layer's experts, in a box that scrolls, the chosen one marked.

    Args:
        layer: its index.
        experts: the rows, from the top.
        columns: what is shown, as text for each expert as they are numbered.
        chosen: the expert that is marked.
    """
    names = [f"<b>▸ {one}</b>" if one == chosen else f"{one}" for one in experts]
    sorted_ = {k: [column[one] for one in experts] for k, column in columns.items()}
    caption = f"Experts of layer {layer}"
    return scrolling_html(caption, columns_html(caption, {"expert": names, **sorted_}))


def _cut_text(scores: np.ndarray, kept: np.ndarray) -> str:
    if kept.all():
        return f"None is pruned; its lowest score is {scores.min():.3g}."
    highest = f"Its highest pruned score is {scores[~kept].max():.3g}"
    if not kept.any():
        return f"{highest}."
    return f"{highest}, its lowest kept one {scores[kept].min():.3g}."


def _histogram(bins: ScoreBins, scores: np.ndarray, kept: np.ndarray, unit: str) -> str:
    """Bars of the removed scores, those of the kept ones on top of them, and the cut.

    Drawn as SVG in pixels of the page, so that its text is as large as the other.
    """
    every, removed = bins.counts(), bins.counts(~kept)
    scale, wide = _HEIGHT / every.max(), _WIDTH / len(every)
    bars = "".join(
        _bar(number * wide, wide, scale * gone, scale * count)
        for number, (gone, count) in enumerate(zip(removed, every, strict=True))
    )
    cut = _cut(bins, scores[~kept])
    ends = bins.edges[0], np.sqrt(bins.edges[0] * bins.edges[-1]), bins.edges[-1]
    ticks = "".join(
        f'<text x="{share * _WIDTH:.0f}" y="{_HEIGHT + _LINE}" text-anchor="{at}" '
        f'fill="currentColor">{end:.2g}</text>'
        for share, at, end in zip(
            (0, 0.5, 1), ("start", "middle", "end"), ends, strict=True
        )
    )
    legend = (
        f"Atoms by score [{unit}], at most {every.max()} in a bar: pruned "
        f'<span style="color:{_REMOVED}" aria-hidden="true">■</span> below, kept '
        f'<span style="color:{_KEPT}" aria-hidden="true">■</span> above; dashed, the '
        "highest pruned score."
    )
    return (
        f'<svg role="img" aria-label="histogram of the scores; the text has the cut" '
        f'width="{_WIDTH}" height="{_HEIGHT + _LINE + 6}" style="max-width:100%;'
        f'display:block;margin:8px 0 0">{bars}{cut}'
        f'<line x1="0" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}" '
        f'stroke="currentColor"></line>{ticks}</svg><div>{legend}</div>'
    )


def _bar(x: float, wide: float, gone: float, every: float) -> str:
    """The bar of one bin; lengths in pixels."""
    parts = ((_REMOVED, _HEIGHT - gone, gone), (_KEPT, _HEIGHT - every, every - gone))
    return "".join(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{high:.1f}" '
        f'style="fill:{color}"></rect>'
        for color, y, high in parts
        if high
    )


def _cut(bins: ScoreBins, removed: np.ndarray) -> str:
    """A dashed line at the highest removed score, if that is on the axis."""
    highest = removed.max(initial=0.0)
    if highest <= 0:
        return ""
    first, last = np.log(bins.edges[[0, -1]])
    x = _WIDTH * (np.log(highest) - first) / (last - first)
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}" stroke="currentColor" '
        'stroke-dasharray="4 3"></line>'
    )
