"""The section that says why pruning hurts a text: which layers, tokens and atoms.

It runs `heapr_lab.evaluation` and shows the results through `attribution_html`.
Importing this needs no torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import ipywidgets as ipw
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.panel.attribution_html import (
    attribution_html,
    measured_html,
    token_html,
)
from heapr_lab.panel.controls import WHOLE_LABEL, NumberBox, said_by, shown_by
from heapr_lab.panel.jobs import Report, ResultJob, status
from heapr_lab.panel.passage_html import left_out_html
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection

if TYPE_CHECKING:
    from heapr_lab.inspection.attribution import Attribution
    from heapr_lab.inspection.passages import Passage
    from heapr_lab.inspection.restoring import Restored

_N_EXPERTS: Final = 8
"""Experts of a layer that are measured: those with the largest attribution."""
_N_ATOMS: Final = 20
_LAYERS, _EXPERTS = "layers", "experts"


class WhySection(ipw.VBox):
    """Attribution of the change of a text's loss, first order and measured.

    `explain` is laid out by the tab, beside the token.

    Attributes:
        attribution: the last first-order result; likewise `restored`, the last
            measured one, and `atoms`, those of a token.
    """

    attribution: "Attribution | None" = None
    restored: "Restored | None" = None
    atoms: pd.DataFrame | None = None

    def __init__(
        self,
        session: PruningSession,
        *,
        text: ipw.Textarea,
        layer: NumberBox,
        position: NumberBox,
        read: "Callable[[], Passage]",
        pruned: Callable[[Selection], tuple[KeepMask, str]],
    ) -> None:
        """Lay the section out.

        Args:
            session: it has the model, and the selection of the masked model.
            text: that is inspected.
            layer: of the chosen token.
            position: of the chosen token.
            read: the tokens of the text.
            pruned: the mask of a selection, and both as text.
        """
        self.session = session
        self._text, self._layer, self._position = text, layer, position
        self._read, self._pruned = read, pruned
        self._build()
        super().__init__([self.attribute, self.what, self.note, self.measure])
        self.what.observe(self.check, names="value")
        self.check()

    def _build(self) -> None:
        self.attribute = ResultJob(
            "Attribute",
            self._attributed,
            asked=lambda: self._asked(self._text),
            of=self.session.named,
            tooltip="share of each layer and token in the loss increase, first order",
        )
        self.what = ipw.Dropdown(
            options=[
                ("each layer", _LAYERS),
                ("experts of the layer of the token below", _EXPERTS),
            ],
            description="restore and prune alone",
            style=WHOLE_LABEL,
            layout={"width": "460px"},
        )
        self.note = ipw.HTML()
        self.measure = ResultJob(
            "Measure",
            self._measured,
            asked=lambda: self._asked(self._text, *self._part()),
            of=self.session.named,
            tooltip="run the model again with each part restored, and pruned alone",
        )
        token = self._text, self._layer, self._position
        self.explain = ResultJob(
            "Attribute to atoms",
            self._explained,
            asked=lambda: self._asked(*token),
            of=lambda: f"{self.session.named()}; {said_by(*token[1:])}",
            tooltip="which pruned experts and atoms of the token change the loss",
        )

    def check(self, _change: Any = None) -> None:
        """Mark results that are out of date, and say how long measuring takes."""
        for job in (self.attribute, self.measure, self.explain):
            job.check()
        self.note.value = self._said_beforehand()

    def _said_beforehand(self) -> str:
        if not self.session.is_ready:
            return ""
        from heapr_lab.inspection.restoring import n_runs

        try:
            keep, layer = self.session.keep, self._layer.number
        except SpecError:  # of which the panel speaks, or the button
            return ""
        if self.what.value == _LAYERS:
            return status(f"Measuring runs the model {n_runs(keep)} times on the text.")
        runs = 2 + 2 * min(_N_EXPERTS, n_runs(keep, layer=layer) // 2 - 1)
        return status(
            f"Measuring runs the model up to {runs} times on the text, for the experts "
            f"of layer {layer} whose first-order attribution is largest."
        )

    def _asked(self, *controls: ipw.Widget) -> tuple[Any, ...]:
        """The current selection and the values of `controls`."""
        return self.session.selection, *map(shown_by, controls)

    def _part(self) -> tuple[ipw.Widget, ...]:
        """The controls that say what is measured."""
        of_experts = self.what.value == _EXPERTS
        return (self.what, self._layer) if of_experts else (self.what,)

    # --- what the buttons start ---------------------------------------------------

    def _attributed(self, report: Report, asked: tuple[Any, ...]) -> str:
        from heapr_lab.inspection.attribution import attribute_loss
        from heapr_lab.inspection.passages import token_losses

        passage = self._read()
        keep, pruned = self._pruned(asked[0])
        report(0, 3, "first order")
        found = attribute_loss(self._model, keep, passage.ids)
        report(1, 3, "the change itself")
        losses = token_losses(
            self._model,
            passage,
            keep=keep,
            progress=lambda done, _: report(1 + done, 3, "the change itself"),
        )
        self.attribution = found
        view = attribution_html(
            found.layers(),
            found.tokens[0],
            passage.tokens,
            change=losses["delta_nll"].mean(),
            pruned=pruned,
        )
        return left_out_html(passage.n_left_out, "end") + view

    def _measured(self, report: Report, asked: tuple[Any, ...]) -> str:
        from heapr_lab.inspection.attribution import attribute_loss
        from heapr_lab.inspection.restoring import restored

        passage = self._read()
        keep, pruned = self._pruned(asked[0])
        report(0, 1, "first order")
        cheap = attribute_loss(self._model, keep, passage.ids)
        shares, place = cheap.layers(), {}
        if asked[2] == _EXPERTS:
            shares = cheap.experts(asked[3])
            shares = shares[shares["n_removed"] > 0].head(_N_EXPERTS)
            place = {"layer": asked[3], "experts": shares["expert"].tolist()}
        self.restored = restored(
            self._model,
            keep,
            passage.ids,
            **place,
            progress=lambda done, total: report(done, total, "run"),
        )
        values = shares["first_order"].to_numpy()
        view = measured_html(self.restored, first_order=values, pruned=pruned)
        return left_out_html(passage.n_left_out, "end") + view

    def _explained(self, report: Report, asked: tuple[Any, ...]) -> str:
        from heapr_lab.inspection.attribution import attribute_token

        selection, _, layer, position = asked
        passage = self._read()
        keep, pruned = self._pruned(selection)
        report(0, 1, "atoms")
        place = {"layer": layer, "position": position}
        self.atoms = attribute_token(self._model, keep, passage.ids, **place)
        report(1, 1, "atoms")
        view = token_html(
            self.atoms, passage.tokens, **place, n=_N_ATOMS, pruned=pruned
        )
        return left_out_html(passage.n_left_out, "end") + view

    @property
    def _model(self) -> Any:
        bench = self.session.workbench
        assert bench is not None  # without one there is no section
        return bench.model
