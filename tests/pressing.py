"""Buttons of the panel, pressed as a person does it, and what is grey then."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from heapr_lab.panel.jobs import Job
from heapr_lab.panel.looks import STALE
from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session import PruningSession

PATIENCE_SECONDS = 120


def panel_on(
    session: PruningSession, corpora: Sequence[str], tasks: Sequence[str] = ()
) -> Explorer:
    """The panel of a session, in which these corpora and tasks can be measured."""
    session.corpora, session.tasks = corpora, tasks
    return Explorer(session)


def error_of(job: Job) -> str:
    """What stands below a button after it was pressed and its work has ended."""
    job.button.click()
    job.wait(PATIENCE_SECONDS)
    assert not job.running
    return str(job.error.value)


def press(job: Job) -> None:
    """Press a button and see that it went well."""
    assert error_of(job) == ""


def evaluate(panel: Explorer, ratio: str = "", weights: str = "") -> None:
    """Press Evaluate, at another ratio and with other weights where they are given."""
    panel.controls.ratio.value = ratio or panel.controls.ratio.value
    panel.weights.weights.value = weights or panel.weights.weights.value
    press(panel.evaluation.job)


def failed(job: Job) -> str:
    """Press a button and see that an alert says why not."""
    error = error_of(job)
    assert 'role="alert"' in error
    return error


@contextlib.contextmanager
def held(job: Job, said: str = "") -> Iterator[None]:
    """Press a button; in the block its work stands still, where it says `said`."""
    reached, go_on = threading.Event(), threading.Event()

    def hold(change: Any) -> None:
        told = change["new"]
        if said in told and "starting" not in told and not reached.is_set():
            reached.set()
            assert go_on.wait(PATIENCE_SECONDS)

    job.text.observe(hold, names="value")
    job.button.click()
    assert reached.wait(PATIENCE_SECONDS)
    try:
        yield
    finally:
        go_on.set()
        job.wait(PATIENCE_SECONDS)


def cancel(job: Job, said: str = "") -> None:
    """Press a button, and Cancel where the work says `said`: it ends without error."""
    with held(job, said):
        job.cancel_button.click()
    assert "cancelled" in job.text.value
    assert job.error.value == ""
    assert not job.button.disabled


def told(panel: Any, path: object, name: str = "save") -> str:
    """What the panel says after the button to `save` or `open` a session."""
    panel.files.file.value = str(path)
    getattr(panel.files, f"{name}_button").click()
    return str(panel.files.message.value)


def export(panel: Any, folder: object, *, weights: str = "") -> str:
    """What the tab shows after Export was pressed; the panel's weights or these."""
    panel.export.folder.value = str(folder)
    panel.weights.weights.value = weights or panel.weights.weights.value
    press(panel.export.job)
    return str(panel.export.job.value)


def is_stale(widget: Any) -> bool:
    """Whether a widget is grey."""
    return STALE in widget._dom_classes
