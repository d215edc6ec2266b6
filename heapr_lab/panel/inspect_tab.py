"""The tab that inspects one text: the effect of pruning on it, and its atoms.

It runs `heapr_lab.inspection` and shows the frames through `passage_html`. Shares of
the change of the loss are *first order*, an estimate, and say so. Importing this needs
no torch.
"""

import contextlib
import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

import ipywidgets as ipw
import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import KEYS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.controls import NumberBox, said_by
from heapr_lab.panel.jobs import Report, ResultJob, jobs_in, parts_of
from heapr_lab.panel.looks import beside, failure, folded, one_of, status
from heapr_lab.panel.passage_html import (
    attribution_html,
    contexts_html,
    continuations_html,
    left_out_html,
    losses_html,
    routing_html,
    token_html,
)
from heapr_lab.panel.session import JobSettings, PruningSession, named
from heapr_lab.pruning.masks import KeepMask

if TYPE_CHECKING:
    from heapr_lab.inspection.passages import Passage

_LONGEST: Final = 2048
"""The largest number of tokens of a text that are read and shown."""
_N_SHOWN: Final = 20
_NO_MODEL = (
    "This panel has a table but no model, so no text can be read; open it with a "
    "workbench: explore(open_workbench('lab'))."
)
_PROMPT = (
    "Return the sum of the array elements over the given axis. If axis is None, the "
    "sum of all elements is returned."
)


def nearest_the_cut(
    table: ImportanceTable, keep: KeepMask, *, estimator: str, n: int = _N_SHOWN
) -> pd.DataFrame:
    """The removed atoms with the highest scores: the last to be pruned.

    Returns:
        Columns layer, expert, atom, score; highest first.
    """
    removed = np.flatnonzero(~keep.rows)
    best = pd.Series(table.scores(estimator)[removed], removed).nlargest(n)
    columns = {name: table.column(name)[best.index] for name in KEYS}
    return pd.DataFrame(columns | {"score": best.to_numpy()})


def _place_text(place: Iterable[int]) -> str:
    """A place as text, for example `layer 0, expert 1, atom 2`."""
    pairs = zip(KEYS, place, strict=True)
    return ", ".join(f"{name} {number}" for name, number in pairs)


def _said(keep: KeepMask, chosen: JobSettings) -> str:
    """The pruned share, and the settings, as text."""
    return f"{keep.achieved_ratio:.1%} of the atoms removed ({named(*chosen)})"


def _box(name: str, numbers: Collection[int]) -> NumberBox:
    """A box for a number from the least of these to the most."""
    least = min(numbers)
    return NumberBox(name, least, least=least, most=max(numbers))


# --- the tab ----------------------------------------------------------------------


class InspectTab(ipw.VBox):
    """The effect of pruning on any text, and the inputs that activate single atoms.

    Attributes:
        session: it has the model, and the selection of the masked model.
        losses: the last result of `passages.token_losses`; likewise `routes`, `atoms`,
            `contexts`, `continuations` (dense, pruned), `attribution`, and `shares`, of
            the pruned atoms of a token. Each is there once its button was pressed.
    """

    def __init__(self, session: PruningSession) -> None:
        """Lay the tab out.

        Args:
            session: what is inspected; without a workbench the tab only says that it
                needs a model.
        """
        self.session = session
        if session.workbench is None:
            super().__init__([ipw.HTML(status(_NO_MODEL))])
            return
        self._job = functools.partial(ResultJob, session)
        self._build_text()
        self._build_token()
        self._build_atom()
        super().__init__(self._rows())
        self.text.observe(self._limit_position, names="value")
        self.nearest.observe(self._take_atom, names="value")
        self.refresh()

    # --- layout -----------------------------------------------------------------

    def _build_text(self) -> None:
        wide = {"width": "95%"}
        self.text = ipw.Textarea(
            _PROMPT, description="text", rows=4, continuous_update=False, layout=wide
        )
        self.n_tokens = NumberBox("tokens to write", 40, least=1, most=1000)
        self.generate = self._job("Generate", self._generated, self.text, self.n_tokens)
        self.compare = self._job("Compare losses", self._compared, self.text)
        self.attribute = self._job("Attribute", self._attributed, self.text)

    def _build_token(self) -> None:
        self.layer = _box("layer of the token", self.session.table.shapes())
        self.position = NumberBox("position of the token", 1, least=0, most=1)
        place = self.layer, self.position

        def explained() -> str:
            return f"{self.session.named()}; {said_by(*place)}"

        self.route = self._job(
            "Show routing", self._routed, self.text, *place, of=lambda: said_by(*place)
        )
        self.explain = self._job(
            "Attribute to atoms", self._explained, self.text, *place, of=explained
        )

    def _build_atom(self) -> None:
        shapes = self.session.table.shapes()
        n_experts, d_inter = map(max, zip(*shapes.values(), strict=True))
        self.atom_layer = _box("layer of the atom", shapes)
        self.expert = _box("expert", range(n_experts))
        self.atom = _box("atom", range(d_inter))
        self._boxes = (self.atom_layer, self.expert, self.atom)
        self.nearest = one_of("pruned last", [("none", ())], width="460px")
        self.note = ipw.HTML()
        boxes = self._boxes
        self.show_contexts = self._job(
            "Show contexts", self._contexts, *boxes, of=lambda: said_by(*boxes)
        )

    def _rows(self) -> list[ipw.Widget]:
        place = beside(self.layer, self.position)
        token = place, self.route, self.explain
        atom = beside(*self._boxes), self.note, self.show_contexts
        return [
            self.text,
            folded("Continue the text", self.n_tokens, self.generate),
            folded("Where pruning hurts the text", self.compare),
            folded("Why it hurts", self.attribute),
            folded("Which experts and atoms serve a token", *token),
            folded("Inputs that activate an atom", self.nearest, *atom),
        ]

    # --- what follows the selection and the controls ---------------------------------

    def refresh(self) -> None:
        """Show the atoms pruned last; called when the selection changes."""
        session = self.session
        if not session.is_ready:
            return
        self._limit_position()
        for job in jobs_in(self):
            job.check()
        try:
            keep, estimator = session.keep, session.selection.estimator
        except SpecError as error:  # an infeasible selection
            self.nearest.options = [("none", ())]
            self.note.value = failure(error)
            return
        self.note.value = ""
        nearest = nearest_the_cut(session.table, keep, estimator=estimator)
        first = "choose an atom" if len(nearest) else "none: nothing is pruned"
        atoms = [
            (f"{_place_text(atom)} (score {score:.3g})", tuple(atom))
            for *atom, score in nearest.itertuples(index=False, name=None)
        ]
        self.nearest.options = [(first, ()), *atoms]

    def _take_atom(self, change: Any) -> None:
        """Put layer, expert and atom into the boxes, if an atom is chosen."""
        for box, value in zip(self._boxes, change["new"], strict=False):
            box.value = value

    def _limit_position(self, _change: Any = None) -> None:
        """Limit the position to those of the text."""
        if not self.session.is_ready:
            return
        with contextlib.suppress(SpecError):  # reported when the text is read
            self.position.most = len(self._passage(self.text.value).tokens) - 1

    # --- what the buttons start ---------------------------------------------------

    def _generated(
        self, report: Report, chosen: JobSettings, text: str, n_tokens: int
    ) -> str:
        from heapr_lab.inspection.passages import continue_text

        bench, prompt = self.session.bench, self._passage(text, room=n_tokens)
        keep, down_projs, pruned = self._made(chosen, report)

        def write(name: str, mask: KeepMask | None, before: int) -> pd.DataFrame:
            return continue_text(
                bench.model,
                bench.tokenizer,
                prompt=prompt,
                n_tokens=n_tokens,
                keep=mask,
                down_projs=None if mask is None else down_projs,
                progress=lambda done, total: report(
                    before + done, 2 * total, f"{name}: token {done} of {total}"
                ),
            )

        frames = write("dense", None, 0), write("pruned", keep, n_tokens)
        self.continuations = frames
        view = continuations_html(prompt.text, *frames, pruned=pruned)
        return left_out_html(prompt.n_left_out, "beginning") + view

    def _compared(self, report: Report, chosen: JobSettings, text: str) -> str:
        from heapr_lab.inspection.passages import token_losses

        passage = self._passage(text)
        keep, down_projs, pruned = self._made(chosen, report)
        report(0, 2, "dense")
        self.losses = token_losses(
            self.session.bench.model,
            passage,
            keep=keep,
            down_projs=down_projs,
            progress=lambda done, total: report(done, total, "pruned"),
        )
        view = losses_html(self.losses, pruned=pruned)
        return left_out_html(passage.n_left_out, "end") + view

    def _attributed(self, report: Report, chosen: JobSettings, text: str) -> str:
        from heapr_lab.inspection.attribution import attribute_loss
        from heapr_lab.inspection.passages import token_losses

        model = self.session.bench.model
        passage, keep, pruned = self._masked(chosen, text)
        report(0, 3, "first order")
        self.attribution = attribute_loss(model, keep, passage.ids)
        report(1, 3, "the change itself")
        losses = token_losses(
            model,
            passage,
            keep=keep,
            progress=lambda done, _: report(1 + done, 3, "the change itself"),
        )
        view = attribution_html(
            self.attribution.layers(),
            self.attribution.tokens,
            passage.tokens,
            change=losses["delta_nll"].mean(),
            pruned=pruned,
        )
        return left_out_html(passage.n_left_out, "end") + view

    def _routed(
        self, report: Report, chosen: JobSettings, text: str, *token: int
    ) -> str:
        from heapr_lab.inspection.activations import atoms_of_token, routing

        place = dict(zip(("layer", "position"), token, strict=True))
        model = self.session.bench.model
        passage, keep, pruned = self._masked(chosen, text)
        report(0, 2, "atoms")
        self.atoms = atoms_of_token(model, passage, **place)
        report(1, 2, "experts")
        self.routes = routing(model, passage)
        report(2, 2)
        view = routing_html(self.routes, self.atoms, keep=keep, pruned=pruned, **place)
        return left_out_html(passage.n_left_out, "end") + view

    def _explained(
        self, report: Report, chosen: JobSettings, text: str, *token: int
    ) -> str:
        from heapr_lab.inspection.attribution import attribute_token

        passage, keep, pruned = self._masked(chosen, text)
        report(0, 1, "atoms")
        place = dict(zip(("layer", "position"), token, strict=True))
        self.shares = attribute_token(
            self.session.bench.model, keep, passage.ids, **place
        )
        report(1, 1, "atoms")
        view = token_html(self.shares, passage.tokens, **place, pruned=pruned)
        return left_out_html(passage.n_left_out, "end") + view

    def _contexts(self, report: Report, chosen: JobSettings, *numbers: int) -> str:
        from heapr_lab.inspection.activations import top_contexts

        bench, (layer, expert, atom) = self.session.bench, numbers
        keep, pruned = self._pruned(chosen)
        is_kept = keep.by_layer(layer)[expert, atom]
        report(0, 1, "reading the corpus")
        windows = bench.calibration_set(self.session.calibration)
        self.contexts = top_contexts(
            bench.model,
            windows,
            tokenizer=bench.tokenizer,
            **dict(zip(KEYS, numbers, strict=True)),
            progress=lambda done, n: report(done, n, f"window {done} of {n}"),
        )
        summary = (
            f"{_place_text(numbers).capitalize()}: "
            f"{'kept' if is_kept else 'pruned'}; masked model: {pruned}. "
            f"Searched: {windows.n_sequences} windows of {windows.label}."
        )
        return contexts_html(self.contexts, summary=summary)

    # --- what they work on --------------------------------------------------------

    def _passage(self, text: str, *, room: int = 0) -> "Passage":
        from heapr_lab.inspection.passages import read_passage

        bench = self.session.bench
        return read_passage(
            bench.model, bench.tokenizer, text=text, room=room, most=_LONGEST
        )

    def _made(self, chosen: JobSettings, report: Report) -> tuple[KeepMask, Any, str]:
        """The mask, the new W_down, if any, and both as text."""
        made = self.session.made(*chosen, part=parts_of(report))
        return made.keep, made.down_projs, _said(made.keep, chosen)

    def _masked(
        self, chosen: JobSettings, text: str
    ) -> "tuple[Passage, KeepMask, str]":
        """The tokens of a text, the mask of a selection, and both as text."""
        return self._passage(text), *self._pruned(chosen)

    def _pruned(self, chosen: JobSettings) -> tuple[KeepMask, str]:
        """The mask of a selection, and both as text."""
        keep = self.session.keep_of(*chosen)
        return keep, f"{_said(keep, chosen)}, masked, not compensated"
