"""The section that says why pruning hurts a text: which layers, tokens and atoms.

Every share is *first order*, an estimate, and says so. Importing this needs no torch.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import ipywidgets as ipw
import numpy as np
import pandas as pd

from heapr_lab.panel.controls import NumberBox, said_by
from heapr_lab.panel.jobs import Report, ResultJob
from heapr_lab.panel.looks import columns_html, numbers, scrolling_html, status
from heapr_lab.panel.passage_html import (
    left_out_html,
    numbered,
    step_style,
    visible,
)
from heapr_lab.panel.session import JobSettings, PruningSession
from heapr_lab.pruning.masks import KeepMask

if TYPE_CHECKING:
    from heapr_lab.inspection.attribution import Attribution
    from heapr_lab.inspection.passages import Passage

_N_ATOMS: Final = 20
_N_TOKENS: Final = 40
"""Tokens of the map; the others are summed in one row."""
_SHADES: Final = (0.125, 0.25, 0.5)
"""Shares of the largest value of the map from which a cell has each of the marks."""
_FIRST_ORDER = "first order [nats/token]"
_MILLI = "first order [0.001 nats/token]"


class WhySection(ipw.VBox):
    """Attribution of the change of a text's loss, to first order.

    `explain` is laid out by the tab, beside the token.

    Attributes:
        attribution: the last result; likewise `atoms`, those of a token.
    """

    attribution: "Attribution | None" = None
    atoms: pd.DataFrame | None = None

    def __init__(
        self,
        session: PruningSession,
        *,
        text: ipw.Textarea,
        layer: NumberBox,
        position: NumberBox,
        masked: "Callable[..., tuple[Passage, KeepMask, str]]",
    ) -> None:
        """Lay the section out.

        Args:
            session: it has the model, and the selection of the masked model.
            text: the text that is inspected.
            layer: the layer of the chosen token.
            position: the position of the chosen token.
            masked: the tokens of a text, the mask of what is chosen, and both as text;
                called with these two.
        """
        self.session = session
        self._masked = masked
        self.attribute = ResultJob(
            "Attribute",
            self._attributed,
            asked=self.session.settings,
            controls=(text,),
            of=self.session.named,
            tooltip="share of each layer and token in the loss increase, first order",
        )
        token = text, layer, position
        self.explain = ResultJob(
            "Attribute to atoms",
            self._explained,
            asked=self.session.settings,
            controls=token,
            of=lambda: f"{self.session.named()}; {said_by(*token[1:])}",
            tooltip="which pruned experts and atoms of the token change the loss",
        )
        super().__init__([self.attribute])

    # --- what the buttons start ---------------------------------------------------

    def _attributed(self, report: Report, chosen: JobSettings, text: str) -> str:
        from heapr_lab.inspection.attribution import attribute_loss
        from heapr_lab.inspection.passages import token_losses

        passage, keep, pruned = self._masked(chosen, text)
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
            attribution.tokens,
            passage.tokens,
            change=losses["delta_nll"].mean(),
            pruned=pruned,
        )
        return left_out_html(passage.n_left_out, "end") + view

    def _explained(
        self, report: Report, chosen: JobSettings, text: str, *token: int
    ) -> str:
        from heapr_lab.inspection.attribution import attribute_token

        passage, keep, pruned = self._masked(chosen, text)
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
