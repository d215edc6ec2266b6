"""The tab that writes the pruned model, and shows how to load it."""

import html
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as ipw

from heapr_lab.errors import SpecError
from heapr_lab.panel.controls import WHOLE_LABEL
from heapr_lab.panel.jobs import Job, Report, Shown, status
from heapr_lab.panel.same_code import SameCode, dtype_of_files
from heapr_lab.panel.session import PruningSession, Way, text_of
from heapr_lab.panel.weights_bar import WeightsBar
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.as_command import weight_options
from heapr_lab.workbench.presets import DEFAULT, METHODS, WEIGHTS
from heapr_lab.workbench.recipe import Written

_EVALUATED = (
    "Evaluate measures these weights, before output biases and distillation; the card "
    "gives the perplexities of what is written."
)

_WRITTEN_BEFORE = "Out of date: what is below was written with other settings."


class ExportTab(ipw.VBox):
    """A folder, options and a button; then the code that loads the model."""

    def __init__(self, session: PruningSession, bar: WeightsBar) -> None:
        """Lay the tab out.

        Args:
            session: whose workbench has the model.
            bar: the switch of the weights.
        """
        self.session, self.weights, self.own = session, bar.weights, bar.own
        self.folder = ipw.Text("pruned", description="folder", continuous_update=False)
        self.bias = ipw.Checkbox(
            value=False,
            description="an output bias for each expert (not uniform)",
            indent=False,
            layout={"width": "auto"},
        )
        self.distill = ipw.IntSlider(
            0, 0, 400, 25, description="distil [steps]", continuous_update=False,
            style=WHOLE_LABEL,
        )  # fmt: skip
        self.job = Job(
            "Export", self._export, tooltip="write the pruned model to the folder"
        )
        self.note = ipw.HTML(status(""))
        self.command = Shown(self._asked, said=_WRITTEN_BEFORE)
        self.code = SameCode(session, self.written, lambda: self._calibration)
        if session.workbench is None:
            self.job.button.disabled = True
            self.job.text.value = status("a table without a model cannot be exported")
        weights = [self.bias, self.distill]
        row = ipw.HBox([self.folder, *weights], layout={"flex_flow": "row wrap"})
        super().__init__([row, self.note, self.job, self.command, self.code])
        for control in weights:
            control.observe(self.refresh, names="value")
        self.folder.observe(self.code.refresh, names="value")
        self.folder.observe(self.command.check, names="value")
        self.refresh()

    @property
    def options(self) -> str:
        """The options of the command line that differ from its defaults."""
        made = Written(
            self.folder.value, self.weights.value, self.bias.value, self.distill.value
        )
        words = weight_options(made, own_text=self._calibration.own_text)
        return "".join(f" {word}" for word in words)

    def _asked(self) -> tuple[object, ...]:
        """The settings that what is written depends on."""
        chosen = self.session.selection, self.session.way
        return *chosen, self.folder.value, self.bias.value, self.distill.value

    def written(self) -> Written:
        """The checkpoint that Export would write."""
        return Written(
            self.folder.value,
            self.weights.value,
            self.bias.value,
            self.distill.value,
            tuple(self._corpora()),
            dtype_of_files(self.session.workbench),
        )

    @property
    def _calibration(self) -> Calibration:
        """What weights are fitted to: that of the table, with text of the model."""
        return self.session.way.calibration(self.session.calibration)

    def refresh(self, _change: Any = None) -> None:
        """Describe what Export would write, and the method."""
        self.code.refresh()
        self.command.check()
        try:
            selection = self.session.selection
        except SpecError:
            self.note.value = status(
                "Nothing can be written: these settings are infeasible."
            )
            return
        chosen = self.weights.value
        text = text_of(selection.text, selection.estimator, chosen)
        lines = [
            f"To be written: {text}; weights: {WEIGHTS[chosen]}. {_EVALUATED}",
            describe_method(selection, weights=chosen, options=self.options),
        ]
        self.note.value = "".join(map(status, lines))

    def _export(self, report: Report) -> None:
        from heapr_lab.checkpoints.folder import check_new

        self.command.show("", None)
        settings = self._asked()
        selection, way = self.session.selection, self.session.way
        folder = Path(self.folder.value)
        check_new(folder)
        self._write(folder, selection, way, report)
        self.command.show(self._written_text(folder), settings)

    def _write(
        self, folder: Path, selection: Selection, way: Way, report: Report
    ) -> None:
        from heapr_lab.workbench import export

        bench: Any = self.session.workbench
        table, calibration = (
            self.session.table,
            way.calibration(self.session.calibration),
        )
        after = export.Afterwards(self.bias.value, self.distill.value)
        after.refuse(selection.structure)
        trained_on = after.windows(bench, calibration, report) if after else None
        made = self.session.made(selection, way, report=report)
        made = replace(made, after=after, trained_on=trained_on)
        if way.weights == "compress":  # which has measured on its own windows
            table = bench.portfolio(calibration).table("heapr", windows="all")
        facts = export.facts_of(
            table, made.keep, source=bench.source, candidates=made.candidates
        )
        export.write_checkpoint(
            folder, made, bench, facts=facts, corpora=self._corpora(), report=report
        )

    def _corpora(self) -> list[str]:
        """Corpora of the card: those of the calibration and of evaluations."""
        from heapr_lab.text.corpora import available_corpora

        points = self.session.points
        evaluated = points.loc[points["nll"].notna(), "dataset"]
        names = dict.fromkeys([self.session.calibration.corpus, *map(str, evaluated)])
        return available_corpora(list(names))[0]

    def _written_text(self, folder: Path) -> str:
        from heapr_lab.checkpoints.model_card import loading_code
        from heapr_lab.models.sources import read_source

        files, bench = read_source(folder), self.session.workbench
        text = f"Written to {folder}: {files.n_bytes:,} bytes, {files.dtype_name}"
        if bench is not None and bench.source is not None:
            text += f" (dense: {bench.source.n_bytes:,})"
        code = html.escape(loading_code(folder))
        return f"{status(f'{text}. To load it:')}<pre>{code}</pre>"


def describe_method(selection: Selection, *, weights: str, options: str = "") -> str:
    """The method of the command line with `options`, or the difference from it."""
    chosen = selection.estimator
    for name, method in METHODS.items():
        if weights == method.weights and (
            weights == "compress" or chosen == method.estimator
        ):
            return f"This is --method {name}{_default(name)}{options}."
    name = "paper" if weights == "unchanged" else "best"
    return f"On the command line this is --method {name} --estimator {chosen}{options}."


def _default(name: str) -> str:
    return " (the command line's default)" if name == DEFAULT else ""
