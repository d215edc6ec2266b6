"""The panel: the controls, and tabs that choose, evaluate, inspect, compare, export."""

import html
import threading
from typing import Any

import ipywidgets as ipw

from heapr_lab.errors import SpecError
from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.panel.answer import (
    Row,
    answers,
    answers_html,
    cautions,
    cautions_html,
    header_html,
    layers_frame,
    numbers_html,
    numbers_of,
    numbers_text,
)
from heapr_lab.panel.compare_tab import CompareTab
from heapr_lab.panel.controls import Controls, WeightsBar
from heapr_lab.panel.evaluate_tab import EvaluateTab
from heapr_lab.panel.export_tab import ExportTab
from heapr_lab.panel.glossary import add_tooltips, terms_html
from heapr_lab.panel.inspect_tab import InspectTab
from heapr_lab.panel.jobs import Job, Report, jobs_in, take_turns
from heapr_lab.panel.keeping import LastSession, StaticCopy
from heapr_lab.panel.looks import (
    PANEL,
    InPage,
    Written,
    beside,
    failure,
    folded,
    mark_stale,
    panel_style,
    picture,
    status,
    table_html,
)
from heapr_lab.panel.pictures import NARROWEST, WIDEST, ChoicePicture
from heapr_lab.panel.session import NotKnownError, PruningSession
from heapr_lab.panel.session_file import SessionBar
from heapr_lab.panel.sweep import SEARCH, search_ratio

TABS = ("Choose", "Evaluate", "Inspect", "Compare", "Export")
_CAPTION = (
    "Left: the pruned share of each layer; dashed, of all layers. Middle: each expert "
    "in the colour of its load, fading to blank as its atoms are pruned. Right: all "
    "scores, of atoms or of whole experts, with the pruned ones in front; dashed, the "
    "highest pruned score."
)
_NO_PICTURE = "Not known yet: Evaluate chooses the atoms, and then they are drawn."
_HELP = "Help: what each control and term means"
_LATEST = 5.0
"""Seconds after which the model is loaded, whether the panel is seen or not."""

_NAMES = {
    ".heapr-choice": _CAPTION,
    ".heapr-losses": "Δloss of each evaluated setting over the removed share; the "
    "table has the numbers.",
    ".heapr-compared": "Pruned share of each layer, for each pin; the table has the "
    "numbers.",
}


class Explorer(ipw.VBox):
    """The interactive panel of a `PruningSession`.

    Attributes:
        session: what is shown; its `points` hold all evaluations.
        controls: they set the selection.
        weights: the switch of how weights are made.
        files: saves and opens sessions.
        last: keeps the session in the cache, and offers the last one.
        header: the line that says what the panel is of.
        cautions: what may be overlooked in the selection.
        copy: what a saved notebook shows without a kernel.
        help: the glossary.
        in_page: what runs in the page.
    """

    def __init__(self, session: PruningSession) -> None:
        """Lay out the panel and show the selection of the session.

        Args:
            session: what to show.
        """
        self.session = session
        self.copy = StaticCopy(self._copied)
        self._drawn = "none yet"
        self._numbers: list[Row] = []
        self._build_choice()
        self._build_tabs()
        self.files = SessionBar(self)
        self.last = LastSession(self.files)
        self.help = Written(_HELP, terms_html)
        self.in_page = InPage(pictures=_NAMES, layout={"display": "none"})
        super().__init__(
            [
                panel_style(),
                self.in_page,
                self.copy.hides,
                self.header,
                self.last,
                beside(
                    *(self.controls.slider, self.controls.ratio),
                    *(self.weights.weights, self.evaluation.job.button),
                ),
                self.evaluation.job,
                self.advanced,
                self.error,
                self.answers,
                self.status,
                self.cautions,
                self.tabs,
                self.files,
                self.help,
            ]
        )
        self.add_class(PANEL)
        add_tooltips(self)
        self.tabs.observe(self._refresh_tab, names="selected_index")
        self.evaluation.corpora.observe(self._retarget, names="value")
        self.in_page.observe(self._widen, names="width")
        for control in (self.weights.weights, self.weights.own):
            control.observe(self.refresh, names="value")
        session.observe(self._on_points, names="points")
        session.observe(self._changed, names="method_rows")
        self.comparison.pinned.observe(self._changed, names="options")
        self.comparison.load_button.on_click(self._load)
        self.show_again()

    def _build_choice(self) -> None:
        """The controls, and what is said and drawn of a selection."""
        session = self.session
        self.controls = Controls(session.table, session.selection, self.refresh)
        self.weights = WeightsBar(session)
        self.header, self.status, self.cautions = ipw.HTML(), ipw.HTML(), ipw.HTML()
        self.error, self.answers, self.numbers = ipw.HTML(), ipw.HTML(), ipw.HTML()
        self.search = Job(SEARCH, self._search, of=lambda: session.recipe.text)
        self.advanced = folded("Advanced", self.controls, self.weights, self.search)
        self.picture, self.caption = picture("choice"), ipw.HTML()
        self._picture = ChoicePicture(session.table)
        self.behind = Written("All numbers", self._layers_html, self.numbers)

    def _build_tabs(self) -> None:
        session = self.session
        self.evaluation = EvaluateTab(session)
        self.comparison = CompareTab(session)
        self.inspection = InspectTab(session)
        self.export = ExportTab(session)
        choice = ipw.VBox([self.picture, self.caption, self.behind])
        others = self.evaluation, self.inspection, self.comparison, self.export
        self.tabs = ipw.Tab([choice, *others], titles=TABS)
        jobs = self.search, self.evaluation.job, *jobs_in(self.tabs)
        take_turns(self.comparison.runs.job, jobs)

    def __repr__(self) -> str:
        # Shown by a notebook without a kernel, so the text is always the same.
        return f"Explorer({self._drawn}; run the notebook to use it)"

    def _widen(self, change: Any) -> None:
        """Draw the picture as wide as the panel, in steps, if it can be that wide."""
        width = min(max(NARROWEST, change["new"] // 100 * 100), WIDEST)
        if width != self._picture.width:
            self._picture = ChoicePicture(self.session.table, width)
            self.comparison.widen(width)
            self.refresh()

    def _ipython_display_(self) -> None:
        self.copy.show(self)
        self.begin()

    def begin(self) -> None:
        """Keep the session, and load the model, of a panel that is displayed."""
        self.last.follow()
        if self.session.workbench is not None:
            self._load_behind()

    def _load_behind(self) -> None:
        """Load the model once the first picture is seen, which that would hold up."""
        seen = threading.Event()
        self.in_page.observe(lambda _: seen.set(), names="width")

        def load() -> None:
            seen.wait(_LATEST)
            self.get_ready()

        threading.Thread(target=load, daemon=True).start()

    def get_ready(self) -> None:
        """Load the model behind the first picture."""
        bench, job = self.session.workbench, self.evaluation.job
        if not self.session.is_ready:
            job.text.value = status("the model is loading, and Evaluate waits for it")
        try:
            getattr(bench, "load", object)()
            self.header.value = header_html(self.session)
            self.comparison.runs.offer()
            add_tooltips(self.comparison.runs)
        except Exception as error:  # an exception in a thread is not shown
            job.error.value = failure(error)
        if not job.running:
            job.text.value = ""
        self.evaluation.follow()

    def _copied(self) -> tuple[str, list[str | memoryview], str]:
        """The picture and the numbers as they are, and all evaluated points."""
        title = f"{self._drawn}; weights: {self.session.recipe.text}"
        parts = (self.error, self.answers, self.picture, self.numbers)
        views = [part.value for part in (*parts, self.evaluation.results)]
        return title, views, numbers_text(self._numbers)

    def refresh(self, _change: Any = None) -> None:
        """Apply the controls: select, count and draw."""
        self.session.panel = self
        self.header.value = header_html(self.session)
        if not self.evaluation.job.running:
            self.evaluation.job.error.value = ""  # which was of other settings
        try:
            self._show()
        except Exception as error:  # an exception in an observer is not shown
            self._fail(error)
        self.evaluation.foresee()
        searches = self.controls.to_target and self.session.workbench is not None
        self.search.layout.display = None if searches else "none"
        self._changed()

    def _load(self, _button: ipw.Button) -> None:
        """Show the settings of the pin that is chosen in the list."""
        pin = self.comparison.pinned.value
        table, selection = self.session.table, pin.selection
        self.controls.show(Controls(table, selection, lambda: None))
        self.weights.show(pin.recipe)
        self.show_again()

    def show_again(self) -> None:
        """Show another selection, with what is advanced only if it is used."""
        if self.controls.are_unusual or self.weights.is_unusual:
            self.advanced.selected_index = 0
        self.refresh()

    def _changed(self, _change: Any = None) -> None:
        self.copy.changed()
        self.last.changed()

    def _show(self) -> None:
        session = self.session
        session.choose(self.controls.selection)
        scope, chooses = session.selection.scope, session.recipe.chooses
        self.controls.show_use(scope, estimator=not chooses)
        target = self._show_target() if self.controls.to_target else ""
        selection = session.selection
        try:
            text = session.describe()
            picture = self._picture.draw(
                session.keep,
                estimator=selection.estimator,
                granularity=selection.granularity,
            )
        except NotKnownError as error:
            text, picture = f"The atoms are {error}.", b""
        with self.hold_sync():
            self.picture.layout.display = None if picture else "none"
            said = html.escape(_CAPTION if picture else _NO_PICTURE)
            self.caption.value = f"<small>{said}</small>"
            self.picture.value = picture
            # At most as wide as it was drawn: if stretched, its text would blur.
            self.picture.layout.max_width = f"{self._picture.width}px"
            # After the picture: counts are never seen beside an earlier one.
            self.status.value = status(f"{text}{target}")
            self.error.value = ""
            for widget in (self.picture, self.behind):
                mark_stale(widget, False)
        self._drawn = selection.text
        self._show_numbers()
        self.export.refresh()
        self._refresh_tab()
        self.behind.refresh()

    def _refresh_tab(self, _change: Any = None) -> None:
        """Update the open tab, if that is expensive; hidden tabs wait."""
        update = {
            "Evaluate": self.evaluation.follow,
            "Inspect": self.inspection.refresh,
        }
        update.get(TABS[self.tabs.selected_index or 0], lambda: None)()

    def _show_target(self) -> str:
        """Show the largest ratio that was measured to be within the target.

        Returns:
            What the ratio is, and the points that it was found by, as text.

        Raises:
            SpecError: none was measured yet, or there is no such target.
        """
        session, corpus = self.session, self._target_corpus
        rise = self.controls.target
        losses = session.measured_losses(corpus)
        if losses.empty and session.workbench is None:
            raise SpecError("a target loss is measured, and a table has no model")
        if losses.empty:
            raise SpecError(f"no ratio was measured on {corpus} yet: press {SEARCH}")
        ratios = losses.index[losses <= rise]
        self.controls.show_ratio(float(max(ratios, default=0.0)))
        session.choose(self.controls.selection)
        points = ", ".join(f"{ratio:.0%} {loss:+.4g}" for ratio, loss in losses.items())
        return (
            f" It is the largest measured ratio whose Δloss on {corpus} is at most "
            f"{rise:g} {PER_TOKEN}. Measured: {points}."
        )

    @property
    def _target_corpus(self) -> str:
        """The first corpus that is chosen in the Evaluate tab."""
        corpora = self.evaluation.corpora
        return str((corpora.value or corpora.options)[0])

    def _search(self, report: Report) -> None:
        """Evaluate ratios until the largest within the target is known."""
        search_ratio(
            self.session,
            self.controls.selection,
            self._target_corpus,
            rise=self.controls.target,
            report=report,
        )
        self.refresh()

    def _retarget(self, _change: Any = None) -> None:
        """Show the ratio of a target loss anew, for another first corpus."""
        if self.controls.to_target:
            self.refresh()

    def _show_numbers(self) -> None:
        self.answers.value = answers_html(answers(self.session))
        self._numbers = numbers_of(self.session)
        self.numbers.value = numbers_html(self._numbers)
        self.cautions.value = cautions_html(cautions(self.session))

    def _layers_html(self) -> str:
        """The numbers of the picture."""
        try:
            return table_html(layers_frame(self.session))
        except SpecError:  # infeasible, or not known yet, as is said above
            return ""

    def _on_points(self, _change: Any = None) -> None:
        if self.session.panel is not self:
            return  # the session has the selection of another panel
        if self.controls.to_target or self.session.recipe.chooses:
            self.refresh()
        elif not self.error.value:
            self._show_numbers()
        self._changed()

    def _fail(self, error: Exception) -> None:
        self.session.reject(error)
        self.error.value = failure(error)
        self.status.value = status(
            "These settings are infeasible. Out of date: the picture and the numbers "
            f"of each layer below are still those of {self._drawn}."
        )
        self._numbers = []
        self.numbers.value = self.answers.value = self.cautions.value = ""
        for widget in (self.picture, self.behind):
            mark_stale(widget, True)
        self.export.refresh()
        self._refresh_tab()
