"""The tab that writes the pruned model, and shows how to load it."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets as ipw

from heapr_lab.errors import SpecError
from heapr_lab.panel.jobs import Report, ResultJob, parts_of
from heapr_lab.panel.looks import (
    Written,
    beside,
    code_html,
    failure,
    line,
    slider,
    status,
)
from heapr_lab.panel.session import JobSettings, PruningSession
from heapr_lab.recipes.weights import WEIGHTS
from heapr_lab.storage.paths import path_of

if TYPE_CHECKING:
    from heapr_lab.workbench.workbench import Workbench

_EVALUATED = (
    "Evaluate measures these weights, before healing; the card gives the "
    "perplexities of what is written."
)

_NO_MODEL = "a table without a model cannot be exported"
_WRITTEN_BEFORE = "Out of date: what is below was written with other settings."


class ExportTab(ipw.VBox):
    """A folder, options and a button; then code that loads the model.

    Attributes:
        code: the box with the settings as Python.
    """

    def __init__(self, session: PruningSession) -> None:
        """Lay the tab out for `session`, whose workbench has the model."""
        self.session = session
        self.folder = line("folder", "pruned")
        self.heal = slider("heal [windows]", 0, most=512, step=32)
        self.job = ResultJob(
            session,
            "Export",
            self._export,
            self.folder,
            self.heal,
            never="" if session.workbench else _NO_MODEL,
            said=_WRITTEN_BEFORE,
        )
        self.note = ipw.HTML(status(""))
        self.code = Written("The settings as Python", self._code_html)
        row = beside(self.folder, self.heal)
        super().__init__([row, self.note, self.job, self.code])
        self.refresh()

    def refresh(self) -> None:
        """Describe what Export would write."""
        self.code.refresh()
        self.job.check()
        try:
            text = f"{self.session.named()}: {WEIGHTS[self.session.recipe.weights]}"
        except SpecError:
            note = "Nothing can be written: these settings are infeasible."
        else:
            note = f"To be written: {text}. {_EVALUATED}"
        self.note.value = status(note)

    def _code_html(self) -> str:
        """The selection, and with a model what is calibrated on, as Python."""
        session = self.session
        try:
            shown: list[object] = [session.selection]
        except SpecError as error:
            return failure(error)
        if session.workbench is not None:
            calibration = session.recipe.calibration(session.calibration)
            shown.append(session.workbench.profile.counted(calibration))
        return code_html("\n".join(map(repr, shown)))

    def _export(self, report: Report, chosen: JobSettings, name: str, heal: int) -> str:
        from heapr_lab.checkpoints.folder import check_new
        from heapr_lab.recipes import export

        folder, bench = path_of(name), self.session.bench
        check_new(folder)
        part = parts_of(report)
        made = self.session.made(*_healed(chosen, heal), part=part)
        export.write_checkpoint(folder, made, bench, corpora=self._corpora(), part=part)
        return _written_text(folder, bench)

    def _corpora(self) -> list[str]:
        """Corpora of the card: those of the calibration and of evaluations."""
        from heapr_lab.text.corpora import available_corpora

        points = self.session.points
        evaluated = points.loc[points["nll"].notna(), "dataset"]
        names = dict.fromkeys([self.session.calibration.corpus, *map(str, evaluated)])
        return available_corpora(list(names))[0]


def _healed(chosen: JobSettings, n_windows: int) -> JobSettings:
    """The settings, with so many windows to heal on."""
    return chosen._replace(recipe=replace(chosen.recipe, heal=n_windows))


def _written_text(folder: Path, bench: "Workbench") -> str:
    from heapr_lab.checkpoints.model_card import loading_code
    from heapr_lab.models.sources import read_source

    files = read_source(folder)
    text = f"Written to {folder}: {files.n_bytes:,} bytes, {files.dtype_name}"
    if bench.source is not None:
        text += f" (dense: {bench.source.n_bytes:,})"
    return status(f"{text}. To load it:") + code_html(loading_code(folder))
