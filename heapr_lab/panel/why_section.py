"""The section that says why pruning hurts a text: which layers, tokens and atoms.

Every value says whether it is *first order* (an estimate) or *measured*. Importing
this needs no torch.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import ipywidgets as ipw
import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.panel.controls import NumberBox, said_by
from heapr_lab.panel.jobs import Report, ResultJob
from heapr_lab.panel.looks import (
    columns_html,
    numbers,
    one_of,
    scrolling_html,
    status,
)
from heapr_lab.panel.passage_html import (
    left_out_html,
    numbered,
    step_style,
    visible,
)
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
_N_TOKENS: Final = 40
"""Tokens of the map; the others are summed in one row."""
_SHADES: Final = (0.125, 0.25, 0.5)
"""Shares of the largest value of the map from which a cell has each of the marks."""
_FIRST_ORDER = "first order [nats/token]"
_MILLI = "first order [0.001 nats/token]"


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
        masked: "Callable[[Selection], tuple[Passage, KeepMask, str]]",
    ) -> None:
        """Lay the section out.

        Args:
            session: it has the model, and the selection of the masked model.
            text: the text that is inspected.
            layer: the layer of the chosen token.
            position: the position of the chosen token.
            masked: the tokens of the text, the mask of a selection, and both as text.
        """
        self.session = session
        self._text, self._layer, self._position = text, layer, position
        self._masked = masked
        self._build()
        super().__init__([self.attribute, self.what, self.note, self.measure])
        for control in (self.what, self._layer):
            control.observe(self.check, names="value")
        self.check()

    def _build(self) -> None:
        self.attribute = ResultJob(
            "Attribute",
            self._attributed,
            asked=lambda: (self.session.selection,),
            controls=(self._text,),
            of=self.session.named,
            tooltip="share of each layer and token in the loss increase, first order",
        )
        experts = "experts of the layer of the token below", _EXPERTS
        self.what = one_of(
            "restore and prune alone", [("each layer", _LAYERS), experts], width="460px"
        )
        self.note = ipw.HTML()
        self.measure = ResultJob(
            "Measure",
            self._measured,
            asked=lambda: (self.session.selection, self._part()),
            controls=(self._text,),
            of=self.session.named,
            tooltip="run the model again with each part restored, and pruned alone",
        )
        token = self._text, self._layer, self._position
        self.explain = ResultJob(
            "Attribute to atoms",
            self._explained,
            asked=lambda: (self.session.selection,),
            controls=token,
            of=lambda: f"{self.session.named()}; {said_by(*token[1:])}",
            tooltip="which pruned experts and atoms of the token change the loss",
        )

    def check(self, _change: Any = None) -> None:
        """Mark results that are out of date, and say how long measuring takes."""
        self.measure.check()
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

    def _part(self) -> int | None:
        """The layer whose experts are measured; None if it is each layer."""
        return self._layer.number if self.what.value == _EXPERTS else None

    # --- what the buttons start ---------------------------------------------------

    def _attributed(self, report: Report, selection: Selection, _text: str) -> str:
        from heapr_lab.inspection.attribution import attribute_loss
        from heapr_lab.inspection.passages import token_losses

        passage, keep, pruned = self._masked(selection)
        report(0, 3, "first order")
        attribution = attribute_loss(self._model, keep, passage.ids)
        report(1, 3, "the change itself")
        losses = token_losses(
            self._model,
            passage,
            keep=keep,
            progress=lambda done, _: report(1 + done, 3, "the change itself"),
        )
        self.attribution = attribution
        view = attribution_html(
            attribution.layers(),
            attribution.tokens[0],
            passage.tokens,
            change=losses["delta_nll"].mean(),
            pruned=pruned,
        )
        return left_out_html(passage.n_left_out, "end") + view

    def _measured(
        self, report: Report, selection: Selection, layer: int | None, _text: str
    ) -> str:
        from heapr_lab.inspection.attribution import attribute_loss
        from heapr_lab.inspection.restoring import restored

        passage, keep, pruned = self._masked(selection)
        report(0, 1, "first order")
        cheap = attribute_loss(self._model, keep, passage.ids)
        shares, place = cheap.layers(), {}
        if layer is not None:
            shares = cheap.experts(layer)
            shares = shares[shares["n_removed"] > 0].head(_N_EXPERTS)
            place = {"layer": layer, "experts": shares["expert"].tolist()}
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

    def _explained(
        self, report: Report, selection: Selection, _text: str, *token: int
    ) -> str:
        from heapr_lab.inspection.attribution import attribute_token

        passage, keep, pruned = self._masked(selection)
        report(0, 1, "atoms")
        place = dict(zip(("layer", "position"), token, strict=True))
        self.atoms = attribute_token(self._model, keep, passage.ids, **place)
        report(1, 1, "atoms")
        view = token_html(self.atoms, passage.tokens, **place, pruned=pruned)
        return left_out_html(passage.n_left_out, "end") + view

    @property
    def _model(self) -> Any:
        bench = self.session.workbench
        assert bench is not None  # without one there is no section
        return bench.model


# --- views --------------------------------------------------------------------------


def attribution_html(
    layers: pd.DataFrame,
    tokens: np.ndarray,
    texts: Sequence[str],
    *,
    change: float,
    pruned: str,
) -> str:
    """The first-order shares of the layers, and the map of layers and tokens.

    Shapes: tokens (L, n_layers), in nats per predicted token; texts (L,).

    Args:
        layers: as `Attribution.layers` has them.
        tokens: attribution to what is removed at each token in each layer.
        texts: the texts of the tokens.
        change: the measured Δloss, in nats per token.
        pruned: says which pruned model it is.
    """
    total = layers["first_order"].sum()
    text = (
        f"First order: the shares of all layers add up to {total:+.4f} nats per token; "
        f"measured, Δ is {change:+.4f}. The nearer the two, the better the shares. "
        f"Masked model: {pruned}."
    )
    columns = {
        "layer": layers["layer"],
        "atoms pruned": numbers(layers["n_removed"], ","),
        _FIRST_ORDER: numbers(layers["first_order"], "+.4f"),
    }
    table = columns_html("Share of each layer in Δ, first order", columns)
    return f"{status(text)}{table}{_map(layers['layer'].tolist(), tokens, texts)}"


def _map(layers: Sequence[int], tokens: np.ndarray, texts: Sequence[str]) -> str:
    """A row for each of the tokens with most, in the order of the text."""
    chosen = np.sort(np.argsort(-np.abs(tokens).sum(1), kind="stable")[:_N_TOKENS])
    largest = np.abs(tokens).max()
    rows = [
        [f"{place}", visible(texts[place]), *_cells(tokens[place], largest)]
        for place in chosen
    ]
    others = np.delete(tokens, chosen, axis=0)
    if len(others):
        rows.append(["–", f"{len(others)} others", *_cells(others.sum(0), np.inf)])
    caption = (
        f"The {len(chosen)} tokens of {len(texts)} at which most is removed, first "
        "order, in thousandths of a nat per token: + makes the text worse (orange, "
        "solid line), − better (blue, dotted line). What is removed at a token may "
        "raise the loss of any token after it."
    )
    names = ["position", "token", "all layers", *(f"layer {k}" for k in layers)]
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    table = columns_html(caption, columns)
    return scrolling_html("attribution by token and layer", table)


def _cells(values: np.ndarray, largest: float) -> list[str]:
    """The sum, and each value, marked by its share of `largest`."""
    return [f"{1000 * values.sum():+.2f}", *(_cell(nats, largest) for nats in values)]


def _cell(value: float, largest: float) -> str:
    step = sum(abs(value) >= share * largest > 0 for share in _SHADES)
    style = step_style(step, worse=value > 0)
    return f'<span style="{style}">{1000 * value:+.2f}</span>'


def measured_html(losses: "Restored", *, first_order: np.ndarray, pruned: str) -> str:
    """What restoring each part gains and what its removal alone costs, measured.

    Args:
        losses: what was measured.
        first_order: the estimate for each row of its frame.
        pruned: says which pruned model it is.
    """
    of_experts = "expert" in losses.frame
    part = "expert" if of_experts else "layer"
    where = f" in layer {losses.frame['layer'].iloc[0]}" if of_experts else ""
    text = (
        f"Measured: Δ is {losses.delta_nll:+.4f} nats per token when all is pruned. "
        f"Each {part}{where} was restored alone, and pruned alone. Parts interact, so "
        f"neither column adds up to Δ. Masked model: {pruned}."
    )
    restored, alone = losses.frame["restored_delta"], losses.frame["alone_delta"]
    columns = {
        part: losses.frame[part],
        "atoms pruned": numbers(losses.frame["n_removed"], ","),
        _FIRST_ORDER: numbers(first_order, "+.4f"),
        "measured: restoring it gains": numbers(losses.delta_nll - restored, "+.4f"),
        "measured: Δ with it restored": numbers(restored, "+.4f"),
        "measured: Δ with only it pruned": numbers(alone, "+.4f"),
    }
    return f"{status(text)}{columns_html(f'Each {part}{where}', columns)}"


def token_html(
    atoms: pd.DataFrame,
    texts: Sequence[str],
    *,
    layer: int,
    position: int,
    pruned: str,
) -> str:
    """The pruned experts and atoms of one token in one layer, first order.

    Args:
        atoms: as `attribution.attribute_token` has them.
        texts: the texts of all tokens, (L,).
        layer: number of the layer.
        position: the position of the token.
        pruned: says which pruned model it is.
    """
    total = atoms["first_order"].sum()
    text = (
        f"Layer {layer}, position {position}: what is pruned of the token's experts "
        f"adds {1000 * total:+.3f} thousandths of a nat per token to the loss of the "
        f"text, first order. Masked model: {pruned}."
    )
    shown = atoms.head(_N_ATOMS)
    columns = {
        "expert": shown["expert"],
        "atom": shown["atom"],
        "routing weight p": numbers(shown["p"], ".4f"),
        "activation h": numbers(shown["h"], "+.4g"),
        _MILLI: numbers(1000 * shown["first_order"], "+.3f"),
    }
    caption = f"The {len(shown)} of {len(atoms)} pruned atoms with most"
    return (
        f"{status(text)}{numbered(texts, position)}{_experts(atoms)}"
        f"{columns_html(caption, columns)}"
    )


def _experts(atoms: pd.DataFrame) -> str:
    groups = atoms.groupby("expert", sort=False).agg(
        n=("atom", "size"), p=("p", "first"), first_order=("first_order", "sum")
    )
    order = groups.sort_values("first_order", key=np.abs, ascending=False)
    columns = {
        "expert": order.index,
        "routing weight p": numbers(order["p"], ".4f"),
        "atoms pruned": order["n"],
        _MILLI: numbers(1000 * order["first_order"], "+.3f"),
    }
    return columns_html("Experts of the token that lose atoms", columns)
