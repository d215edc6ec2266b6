"""Progress of several parts is that of the whole; the time left is what it will be."""

import functools

import pytest
from heard import Heard

from heapr_lab.panel import jobs
from heapr_lab.panel.jobs import Job, Report
from heapr_lab.progress import Parts, TimeLeft, progress_bars, time_left_text


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """The time now."""
        return self.now


def test_parts_count_through():
    """Three parts of 4, 2 and 3, of which the second never reports."""
    calls = Heard()
    parts = Parts(9, calls)
    first = parts.part(4)
    first(2, 4)
    first(4, 4)
    parts.part(2)
    assert parts.done == 4
    parts.part(3)(3, 3)
    assert calls == [(2, 9), (4, 9), (9, 9)]
    assert parts.done == parts.total == 9


def test_a_part_has_its_own_units_and_never_goes_back():
    """Answers count as windows; what begins again with smaller batches waits."""
    calls = Heard()
    parts = Parts(10, calls)
    parts.part(4)(0, 0)
    report = parts.part(6)
    for done in (0, 10, 30, 0, 20, 30):
        report(done, 30)
    assert [done for done, _ in calls] == [0, 4, 6, 10, 10, 10, 10]


def test_a_part_that_never_reports_has_no_bar(monkeypatch, capsys):
    """Such as self-generated text where none is asked for; the others have theirs."""
    monkeypatch.setenv("HEAPR_LAB_PROGRESS", "1")
    with progress_bars() as part:
        part("own text", "token")
        part("compensation", "window")(1, 4)
    shown = capsys.readouterr().err
    assert "own text" not in shown
    assert "compensation" in shown


def test_another_piece_of_work_has_its_own_speed():
    """Counting from the beginning again: what came before was of another kind."""
    clock = Clock()
    left = TimeLeft(clock=clock)
    clock.now += 1000
    left.reached(8)
    for done in (1, 2):
        clock.now += 1
        left.reached(done)
        assert left.seconds(16) == 16 - done


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""), (0.0, ""), (0.4, ", about 0:00 left"), (65.2, ", about 1:05 left"),
        (59.7, ", about 1:00 left"), (7322.0, ", about 122:02 left"),
    ],
)  # fmt: skip
def test_the_time_left_in_words(seconds, text):
    """Minutes and seconds; nothing where nothing is known or nothing is left."""
    assert time_left_text(seconds) == text


def test_a_job_says_how_long_it_takes_yet(monkeypatch):
    """As it estimates from the work so far; what was cached took none."""
    clock = Clock()
    monkeypatch.setattr(jobs, "TimeLeft", functools.partial(TimeLeft, clock=clock))
    shown: list[str] = []
    job: Job

    def work(report: Report) -> None:
        for done, seconds in enumerate((30, 30, 20, 30, 20)):
            clock.now += seconds
            report(done, 4, "window", cached=seconds == 20)
            shown.append(job.text.value)

    job = Job("Go", work)
    job.start()
    job.wait(60)
    left = ", about 1:30 left", ", about 1:00 left", ", about 0:30 left", ""
    expected = ["0 of 4", *(f"{n} of 4{text}" for n, text in enumerate(left, 1))]
    assert [text.split(": ")[1].split("<")[0] for text in shown] == expected
