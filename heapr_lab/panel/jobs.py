"""Buttons that run work in a thread, with progress, time left, Cancel and errors."""

import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import ipywidgets as ipw
from IPython.core.getipython import get_ipython

from heapr_lab.errors import HeaprLabError
from heapr_lab.panel.controls import shown_by
from heapr_lab.panel.glossary import widgets_in
from heapr_lab.panel.looks import alert, beside, button, failure, mark_stale, status
from heapr_lab.panel.session import PruningSession
from heapr_lab.progress import StartPart, TimeLeft, time_left_text

SECONDS: Final = 1.0
"""Seconds from the last move of a control to what need not keep up with it."""
_OUT_OF_DATE = (
    "Out of date: made with other settings, or from another text, than those above; "
    "press the button again."
)


class Report(Protocol):
    """Takes the progress of work; raises `CancelledError` once that is cancelled."""

    def __call__(
        self, done: float, total: float, text: str = "", *, cached: bool = False
    ) -> None:
        """Show that `done` of `total` is done, and how long the rest takes.

        `text` names the work; `cached` says that what is new took no work, so that the
        time left is not estimated from it.
        """


def parts_of(report: Report) -> StartPart:
    """Reports each part of some work, by its label and unit."""
    return lambda label, unit: (
        lambda done, total: report(done, total, f"{label}: {unit}")
    )


_JOBS: "weakref.WeakSet[Job]" = weakref.WeakSet()


class CancelledError(Exception):
    """Ends the work of a job whose Cancel button was pressed."""


class Job(ipw.VBox):
    """A button that starts `work`, its progress, and a Cancel button.

    One piece of work runs at a time, and the kernel stays usable. An exception is shown
    below the button, as an alert.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Report], None],
        *,
        of: Callable[[], str] = str,
        never: str = "",
        apart: bool = False,
        below: Sequence[ipw.Widget] = (),
    ) -> None:
        """Lay out the button.

        Args:
            name: label of the button.
            work: called in a thread with a `Report`; it sets the values of widgets.
            of: the settings that it starts with as text, which stands before its
                progress; a `HeaprLabError` is shown as that of the work.
            never: why the work can never start; empty if it can.
            apart: whether `button` is laid out elsewhere.
            below: what else is laid out, below all that.
        """
        self.work, self._of = work, of
        self.waits_for: Sequence[Job] = ()
        """While one of them runs, the work cannot start."""
        self.button = button(name, self.start, primary=True)
        stops = f"stop {name} at its next step"
        self.cancel_button = button("Cancel", self.cancel, said=stops)
        self.bar = ipw.FloatProgress(min=0.0, max=1.0, description="progress")
        self.text = ipw.HTML()
        self.error = ipw.HTML()
        self._stop = threading.Event()
        _JOBS.add(self)
        self._worker: threading.Thread | None = None
        self._left = TimeLeft()
        line = [self.button, self.cancel_button, self.bar, self.text][apart:]
        super().__init__([beside(*line), self.error, *below])
        self._show_running(False, never)
        self.button.disabled = bool(never)

    @property
    def running(self) -> bool:
        """Whether the work is running."""
        return self._worker is not None and self._worker.is_alive()

    def start(self, _button: ipw.Button | None = None) -> None:
        """Start it, as the button does, unless it or what it waits for is running."""
        if self.running:
            return
        for job in self.waits_for:
            if job.running:
                name = job.button.description
                self.error.value = alert(f"wait until {name} has ended, or cancel it")
                return
        self._stop.clear()
        _stop_when_interrupted()
        self._left = TimeLeft()
        self._show_running(True, "starting")
        self._worker = threading.Thread(target=self._run, daemon=True)
        self._worker.start()

    def cancel(self, _button: ipw.Button | None = None) -> None:
        """Stop the work at its next report."""
        self._stop.set()
        self.cancel_button.disabled = True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the work has ended, or for `timeout` seconds."""
        if self._worker is not None:
            self._worker.join(timeout)

    def _run(self) -> None:
        message = ""
        try:
            named = self._of()
            self._named = f"{named}: " if named else ""
            self.work(self._report)
        except CancelledError:
            message = "cancelled"
        except Exception as error:  # an exception in a thread is not shown
            self.error.value = failure(error)
        finally:
            self._show_running(False, message)

    def _report(
        self, done: float, total: float, text: str = "", *, cached: bool = False
    ) -> None:
        if self._stop.is_set():
            raise CancelledError
        if not done:
            self._left = TimeLeft()  # what came before was other work
        (self._left.skip_to if cached else self._left.reached)(done)
        left = time_left_text(self._left.seconds(total))
        self.bar.value = done / total if total else 0.0
        self.text.value = status(f"{self._named}{text}: {done:g} of {total:g}{left}")

    def _show_running(self, running: bool, message: str) -> None:
        if running:
            self.error.value = ""
            self.bar.value = 0.0
        for shown in (self.bar, self.cancel_button):
            shown.layout.display = None if running else "none"
        self.text.value = status(message)
        self.button.disabled = running
        self.cancel_button.disabled = not running


def _stop_when_interrupted() -> None:
    """Let an interrupt of the kernel stop all work, and not only a cell that runs."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is not None:  # its loop runs in the thread that signals reach
        kernel.io_loop.add_callback(signal.signal, signal.SIGINT, _stop_all)


def _stop_all(*_signal: object) -> None:
    for job in _JOBS:
        job._stop.set()


def take_turns(alone: Job, jobs: Iterable[Job]) -> None:
    """Let `alone` run only while no other of `jobs` does; the others wait for it.

    A method that drops experts changes the model in all threads while it is measured.
    """
    alone.waits_for = [job for job in jobs if job is not alone]
    for job in alone.waits_for:
        job.waits_for = [alone]


def jobs_in(widget: ipw.Widget) -> Iterator[Job]:
    """Every job in a widget, however deep."""
    return (job for job in widgets_in(widget) if isinstance(job, Job))


class Debounced:
    """Does something once, `SECONDS` after the last of several requests."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Nothing is asked for yet; `work` is called in a thread."""
        self._work = work
        self._timer = threading.Timer(SECONDS, work)

    def again(self) -> None:
        """Ask for it; what was asked for before and has not begun is not done."""
        self._timer.cancel()
        self._timer = threading.Timer(SECONDS, self._work)
        self._timer.daemon = True
        self._timer.start()


class ResultJob(Job):
    """A job with a result below it, grey once the settings are not those it is of."""

    def __init__(
        self,
        session: PruningSession,
        name: str,
        make: Callable[..., str],
        *controls: ipw.Widget,
        said: str = _OUT_OF_DATE,
        **options: Any,
    ) -> None:
        """Lay out the button; there is no result.

        Args:
            session: its settings are those of the work.
            name: label of the button.
            make: called in a thread with a `Report`, the `JobSettings` at the start,
                and the values of the controls then; the result as HTML.
            *controls: their values are settings too.
            said: what stands above a result that is out of date.
            **options: the other options of `Job`.
        """
        note, view = ipw.HTML(), ipw.HTML()
        below = note, view
        super().__init__(name, self._work, of=session.named, below=below, **options)
        self._session, self._make, self._said = session, make, said
        self._controls = controls
        for control in controls:
            control.observe(self.check, names="value")
        self.note, self._view = note, view
        self._made_of: object = None

    @property
    def value(self) -> str:
        """The result as HTML."""
        return str(self._view.value)

    def clear(self) -> None:
        """Show no result."""
        self._view.value = ""
        self.check()

    def check(self, _change: object = None) -> None:
        """Mark the result if it is out of date."""
        stale = bool(self.value) and self._made_of != self._current()
        self.note.value = status(self._said) if stale else ""
        mark_stale(self._view, stale)

    def _run(self) -> None:
        self.clear()
        super()._run()

    def _work(self, report: Report) -> None:
        settings = self._settings()
        view = self._make(report, *settings)
        self._made_of, self._view.value = settings, view
        self.check()

    def _settings(self) -> tuple[Any, ...]:
        return self._session.settings(), *map(shown_by, self._controls)

    def _current(self) -> object:
        try:
            return self._settings()
        except HeaprLabError:
            return HeaprLabError
