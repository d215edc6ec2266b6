"""The tab that runs the model: perplexity and accuracy of the selection."""

import contextlib
from typing import Any

import ipywidgets as ipw
import pandas as pd

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.panel.answer import cautions_html, judged_on_own
from heapr_lab.panel.compare_tab import dull
from heapr_lab.panel.controls import several_of
from heapr_lab.panel.jobs import Job, Report
from heapr_lab.panel.looks import (
    badge,
    beside,
    failure,
    line,
    picture,
    status,
    table_html,
)
from heapr_lab.panel.pictures import drawn_png, figure_points
from heapr_lab.panel.session import PruningSession, setting_text
from heapr_lab.panel.sweep import Sweep, differences, read_ratios, sweep_of
from heapr_lab.progress import duration
from heapr_lab.recipes.weights import MASKED
from heapr_lab.storage.paths import path_of
from heapr_lab.text.corpora import load_corpus

_SHOWN = ["dataset", "weights", "estimator", "scope", "granularity", "structure"]
_SHOWN += ["achieved_ratio"]
_MEASURED = ["nll", "delta_nll", "perplexity", "accuracy", "stderr"]
_NO_MODEL = "a table without a model cannot be evaluated"
_NOT_YET = "how long is known once the model is loaded and was evaluated"
_NOTHING_YET = (
    "Nothing has been evaluated yet. Evaluate measures the dense and the pruned model."
)
_PAIRED = (
    f"At the same ratio: by how much a setting loses more than another [{PER_TOKEN}], "
    "± standard error over windows, on each of which the two are compared"
)
_MADE = (
    "Masked: the dense model without the pruned atoms. With other weights, what is "
    "evaluated is what Export writes, before healing; compress chooses the "
    "estimator itself."
)


class EvaluateTab(ipw.VBox):
    """The corpora, the tasks, a button, and a chart and a table of all points."""

    def __init__(self, session: PruningSession) -> None:
        """Lay the tab out.

        Args:
            session: what is evaluated.
        """
        self.session = session
        self.corpora = several_of("corpora", session.corpora, session.corpora[:1])
        self.tasks = several_of("tasks", session.tasks, [])
        self.another = line("another corpus", hint="pydocs:torch, or a file")
        self.job = Job(
            "Evaluate",
            self._evaluate,
            of=session.named,
            never="" if session.workbench else _NO_MODEL,
            apart=True,
        )
        self.chart = picture("losses", display="none", max_width="min(100%, 840px)")
        self.message = ipw.HTML(status(_NOTHING_YET))
        self.cautions, self.results = ipw.HTML(), ipw.HTML()
        self.differences = ipw.HTML()
        self.sweep = SweepSection(self)
        super().__init__(
            [
                beside(self.corpora, self.another, self.tasks),
                self.sweep,
                self.message,
                self.cautions,
                beside(self.chart, self.results),
                self.differences,
                ipw.HTML(f"<small>{_MADE}</small>"),
            ]
        )
        for box in (self.corpora, self.tasks):
            box.observe(self.foresee, names="value")
        self.another.observe(self._add_corpus, names="value")
        session.observe(self.refresh, names="points")

    @property
    def datasets(self) -> list[str]:
        """The corpora and tasks that are chosen."""
        return [*self.corpora.value, *self.tasks.value]

    def _add_corpus(self, change: Any) -> None:
        """Offer the corpus that was typed, and choose it too, if it is there."""
        name, chosen = change["new"].strip(), self.corpora.value
        if not name:
            return
        self.job.error.value = ""
        try:
            name = str(path_of(name))
            load_corpus(name, split="test")
        except HeaprLabError as error:
            self.job.error.value = failure(error)
            return
        self.another.value = ""
        self.corpora.options = list(dict.fromkeys([*self.corpora.options, name]))
        self.corpora.value = list(dict.fromkeys([*chosen, name]))

    def follow(self) -> None:
        """Say how long Evaluate and Sweep take with what is chosen now."""
        self.foresee()
        self.sweep.refresh()

    def refresh(self, _change: Any = None) -> None:
        """Draw all points again."""
        points = self.session.points
        self.chart.layout.display = "none" if points.empty else None
        if points.empty:
            self.message.value = status(_NOTHING_YET)
            self.results.value = self.cautions.value = self.differences.value = ""
            return
        self.chart.value = drawn_png(lambda: figure_points(points))
        self.message.value = status(_message(points), before=badge())
        pruned = points[points["nll"].notna() & points["estimator"].ne("dense")]
        alone = judged_on_own(set(pruned["dataset"]), self.session.calibration)
        self.cautions.value = cautions_html([alone] if alone else [])
        self.results.value = _table(points)
        self.differences.value = _differences(self.session)

    def _evaluate(self, report: Report) -> None:
        self.session.evaluate(self.datasets, report=report, masked_first=True)

    def foresee(self, _change: Any = None) -> None:
        """Say how long Evaluate takes, unless it runs or that is not known."""
        session = self.session
        each = session.seconds_a_window
        if self.job.running or not session.is_ready:
            return
        self.job.text.value = ""
        if each is None:
            return
        with contextlib.suppress(HeaprLabError):  # of which Evaluate speaks
            models = {None, MASKED, session.recipe}
            n_windows = sum(
                session.n_windows(self.datasets, session.selection, recipe or MASKED)
                for recipe in models
            )
            self.job.text.value = status(
                f"about {duration(each * n_windows)}, if none of it is cached"
            )


def _differences(session: PruningSession) -> str:
    """The table of settings at the same ratio; empty where there are no two."""
    frame = differences(session)
    if frame.empty:
        return ""
    shown = frame.assign(
        removed=frame["removed"].map("{:.1%}".format),
        difference=[
            f"{row.difference:+.4f} ± {row.stderr:.4f}" for row in frame.itertuples()
        ],
    ).drop(columns="stderr")
    return f"<b>{_PAIRED}</b>{table_html(shown)}"


def _message(points: pd.DataFrame) -> str:
    """The last point of the chart, in a sentence."""
    pruned = points[points["estimator"].ne("dense")]
    if pruned.empty:
        return "Only the dense model was evaluated."
    last = pruned.iloc[-1]
    removed = f"{last.achieved_ratio:.1%} of the atomic experts removed"
    setting = setting_text(last.selection, last.weights)
    change = (
        f"Δloss on {last.dataset} {last.delta_nll:+.4f} {PER_TOKEN}, perplexity "
        f"{last.perplexity:,.2f}"
    )
    if pd.isna(last.nll):
        dense = points[points["estimator"].eq("dense")]
        before = dense["accuracy"][dense["dataset"].eq(last.dataset)].iloc[0]
        change = (
            f"accuracy on {last.dataset} {before:.1%} → {last.accuracy:.1%} (standard "
            f"error {last.stderr:.1%})"
        )
    return f"Last point, {last.weights}: {removed}, {change}. Pruned by: {setting}."


def _table(points: pd.DataFrame) -> str:
    measured = [name for name in _MEASURED if points[name].notna().any()]
    columns = [*_SHOWN, *measured]
    shown = points.sort_values(["dataset", "achieved_ratio"], kind="stable")[columns]
    removed = shown["achieved_ratio"].map("{:.1%}".format)
    return table_html(shown.assign(achieved_ratio=removed).drop(columns=dull(shown)))


# --- several at once ------------------------------------------------------------------


class SweepSection(ipw.VBox):
    """Ratios, estimators, and a button that evaluates all of them."""

    def __init__(self, tab: EvaluateTab) -> None:
        """Lay it out.

        Args:
            tab: what is chosen in its lists is measured, and the selection of its
                session is evaluated at other ratios.
        """
        self.session, self._tab = tab.session, tab
        self.ratios = line("ratios", "10%, 20%, 40%")
        names = self.session.table.estimators
        usual = ["heapr"] if "heapr" in names else names[:1]
        self.estimators = several_of("estimators", names, usual)
        self.note = ipw.HTML()
        self.job = Job(
            "Sweep",
            self._sweep,
            of=lambda: f"{', '.join(self.estimators.value)} at {self.ratios.value}",
            never="" if self.session.workbench else _NO_MODEL,
        )
        super().__init__([beside(self.ratios, self.estimators), self.note, self.job])
        for box in (self.ratios, self.estimators, tab.corpora, tab.tasks):
            box.observe(self.refresh, names="value")
        self.refresh()

    def refresh(self, _change: Any = None) -> None:
        """Say what Sweep would measure, and how long that takes."""
        try:
            text = _planned(self._asked(), self.session)
        except HeaprLabError as error:
            text = str(error)
        self.note.value = status(text)

    def _asked(self) -> Sweep:
        """What is chosen.

        Raises:
            SpecError: it is nothing, or the current selection is infeasible.
        """
        return sweep_of(
            *self.session.settings(),
            ratios=read_ratios(self.ratios.value),
            estimators=self.estimators.value,
            datasets=self._tab.datasets,
        )

    def _sweep(self, report: Report) -> None:
        sweep = self._asked()
        if not sweep.missing(self.session):
            raise SpecError(
                "all of this is measured already: choose other ratios, estimators, "
                "corpora or weights"
            )
        sweep.run(self.session, report=report)
        self.refresh()


def _planned(sweep: Sweep, session: PruningSession) -> str:
    """How many evaluations are left of a sweep, and how long they take."""
    missing, total = len(sweep.missing(session)), len(sweep.selections)
    names = ", ".join(sweep.datasets)
    if not missing:
        return f"All {total} are measured on {names}."
    seconds = sweep.seconds(session)
    known = _NOT_YET if seconds is None else f"about {duration(seconds)}"
    return f"{missing} of {total} are left to be measured on {names}: {known}."
