"""The part of the Evaluate tab that measures many ratios and estimators at once."""

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as ipw

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.panel.jobs import Job, Report, status
from heapr_lab.panel.session import PruningSession
from heapr_lab.panel.sweep import Sweep, read_ratios, sweep_of
from heapr_lab.progress import duration

_AFTER_ONE = "how long is known after one evaluation"


class SweepSection(ipw.VBox):
    """Ratios, estimators, and a button that evaluates all of them."""

    def __init__(
        self,
        session: PruningSession,
        *,
        corpora: ipw.SelectMultiple,
        tasks: ipw.SelectMultiple,
        on_points: Callable[[], None],
    ) -> None:
        """Lay it out.

        Args:
            session: its selection is evaluated at other ratios.
            corpora: the list of the tab, of which those chosen are measured.
            tasks: the same of tasks.
            on_points: called in the measuring thread when there are new points.
        """
        self.session, self._on_points = session, on_points
        self._corpora, self._tasks = corpora, tasks
        self.ratios = ipw.Text(
            "10%, 20%, 40%", description="ratios", continuous_update=False
        )
        self.estimators = _estimators(session)
        self.note = ipw.HTML()
        self.job = Job(
            "Sweep", self._sweep, tooltip="evaluate each estimator at each ratio"
        )
        if session.workbench is None:
            self.job.button.disabled = True
        choices = [self.ratios, self.estimators]
        wrap = {"flex_flow": "row wrap"}
        super().__init__([ipw.HBox(choices, layout=wrap), self.note, self.job])
        for box in (self.ratios, self.estimators, corpora, tasks):
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
            self.session.selection,
            self.session.way,
            ratios=read_ratios(self.ratios.value),
            estimators=self.estimators.value,
            corpora=self._corpora.value,
            tasks=self._tasks.value,
        )

    def _sweep(self, report: Report) -> None:
        found = self._asked()
        if not found.missing(self.session):
            raise SpecError(
                "all of this is measured already: choose other ratios, estimators, "
                "corpora or weights"
            )
        found.run(self.session, report=report, on_points=self._on_points)
        self.refresh()


def _planned(sweep: Sweep, session: PruningSession) -> str:
    """How many evaluations are left of a sweep, and how long they take."""
    missing, total = len(sweep.missing(session)), len(sweep.selections)
    names = ", ".join((*sweep.corpora, *sweep.tasks))
    if not missing:
        return f"All {total} are measured on {names}."
    seconds = sweep.seconds(session)
    known = _AFTER_ONE if seconds is None else f"about {duration(seconds)}"
    return f"{missing} of {total} are left to be measured on {names}: {known}."


def _estimators(session: PruningSession) -> ipw.SelectMultiple:
    names: Sequence[str] = session.table.estimators
    return ipw.SelectMultiple(
        options=list(names),
        value=["heapr"] if "heapr" in names else list(names[:1]),
        rows=min(5, max(2, len(names))),
        description="estimators",
    )
