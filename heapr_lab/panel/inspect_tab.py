"""The tab that inspects one text: how it goes on, what it loses, and why.

It runs `heapr_lab.inspection` and shows the frames through `passage_html`. Shares of
the change of the loss are *first order*, an estimate, and say so. Importing this needs
no torch.
"""

import functools
from typing import TYPE_CHECKING, Any, Final

import ipywidgets as ipw
import pandas as pd

from heapr_lab.panel.controls import NumberBox
from heapr_lab.panel.jobs import Report, ResultJob, jobs_in, parts_of
from heapr_lab.panel.looks import folded, status
from heapr_lab.panel.passage_html import (
    attribution_html,
    continuations_html,
    left_out_html,
    losses_html,
)
from heapr_lab.panel.session import JobSettings, PruningSession, named
from heapr_lab.pruning.masks import KeepMask

if TYPE_CHECKING:
    from heapr_lab.inspection.passages import Passage

_LONGEST: Final = 2048
"""The largest number of tokens of a text that are read and shown."""
_NO_MODEL = (
    "This panel has a table but no model, so no text can be read; open it with a "
    "workbench: explore(open_workbench('lab'))."
)
_PROMPT = (
    "Return the sum of the array elements over the given axis. If axis is None, the "
    "sum of all elements is returned."
)


def _said(keep: KeepMask, chosen: JobSettings) -> str:
    """The pruned share, and the settings, as text."""
    return f"{keep.achieved_ratio:.1%} of the atoms removed ({named(*chosen)})"


# --- the tab ----------------------------------------------------------------------


class InspectTab(ipw.VBox):
    """The effect of pruning on any text.

    Attributes:
        session: it has the model, and the selection of the masked model.
        losses: the last result of `passages.token_losses`; likewise `continuations`
            (dense, pruned) and `attribution`. Each is there once its button was
            pressed.
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
        job = functools.partial(ResultJob, session)
        self.text = ipw.Textarea(
            _PROMPT,
            description="text",
            rows=4,
            continuous_update=False,
            layout={"width": "95%"},
        )
        self.n_tokens = NumberBox("tokens to write", 40, least=1, most=1000)
        self.generate = job("Generate", self._generated, self.text, self.n_tokens)
        self.compare = job("Compare losses", self._compared, self.text)
        self.attribute = job("Attribute", self._attributed, self.text)
        super().__init__(
            [
                self.text,
                folded("Continue the text", self.n_tokens, self.generate),
                folded("Where pruning hurts the text", self.compare),
                folded("Why it hurts", self.attribute),
            ]
        )

    def refresh(self) -> None:
        """Mark what is out of date; called when the selection changes."""
        for job in jobs_in(self):
            job.check()

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

        model, passage = self.session.bench.model, self._passage(text)
        keep = self.session.keep_of(*chosen)
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
            pruned=f"{_said(keep, chosen)}, masked, not compensated",
        )
        return left_out_html(passage.n_left_out, "end") + view

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
