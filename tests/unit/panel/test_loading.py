"""With its table in the cache, a model is shown before it is loaded."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipywidgets as ipw
import pytest
from pressing import error_of, press
from processes import says
from tiny_folder import write_model, write_text

from heapr_lab.errors import SpecError
from heapr_lab.models import named
from heapr_lab.panel import keeping, opening
from heapr_lab.panel.jobs import Job
from heapr_lab.panel.opening import LoadingWorkbench, explore
from heapr_lab.panel.panel import Explorer
from heapr_lab.storage.cache import cached_folder
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench import workbench

MOST_MODULES = 1_200
"""The most modules, of all packages, imported before the first picture."""
SLOW = ("torch", "transformers", "datasets", "lm_eval", "scipy.stats")
OPEN = """
import sys
from heapr_lab import explore
from heapr_lab.text.calibration_spec import Calibration
panel = explore({model!r}, profile="small", corpora=({text!r},), tasks=(),
                calibration=Calibration({text!r}))
assert bytes(panel.picture.value).startswith(b"\\x89PNG")
print(panel.answers.value.count("→"), len(sys.modules))
print(*sorted({slow!r} & sys.modules.keys()))
"""


@pytest.fixture
def asked(tmp_path) -> dict[str, Any]:
    """What is asked for of a tiny model and a text."""
    write_text(tmp_path / "text.txt")
    text = str(tmp_path / "text.txt")
    return {
        "source": str(write_model(tmp_path / "moe")),
        "profile": "small", "corpora": (text,), "tasks": (),
        "calibration": Calibration(text),
    }  # fmt: skip


def opened(asked: dict[str, Any]) -> tuple[Explorer, LoadingWorkbench]:
    """A panel, and its workbench."""
    panel = explore(**asked)
    bench: Any = panel.session.workbench
    assert isinstance(bench, LoadingWorkbench)
    return panel, bench


def test_nor_does_that_of_a_model_with_a_name(asked, monkeypatch):
    """Its folder is in the cache, made at first use."""

    def made() -> Path:
        return cached_folder("models", {"tiny": 1}, write_model, name="tinymoe")

    monkeypatch.setitem(named._FOLDERS, "tinymoe", made)
    for is_loaded in (True, False):
        _, bench = opened(asked | {"source": "tinymoe"})
        assert bench.is_loaded == is_loaded


def test_the_first_picture_needs_no_model(asked):
    """Neither torch nor transformers is imported before it, nor much else."""
    first, bench = opened(asked)
    assert bench.is_loaded  # there was no table
    code = OPEN.format(model=asked["source"], text=asked["corpora"][0], slow={*SLOW})
    counts, slow = says("-c", code).splitlines()
    n_known, n_modules = map(int, counts.split())
    assert slow == ""
    assert n_known == 2  # parameters and bytes
    assert n_modules < MOST_MODULES
    again, bench = opened(asked)
    assert not bench.is_loaded
    assert again.answers.value == first.answers.value
    assert "the model is not loaded yet" in again.header.value


def test_the_model_comes_behind(asked):
    """Then all is as with a model that was there at once, and times are known."""
    first, _ = opened(asked)
    again, bench = opened(asked)
    assert again.comparison.runs.methods.options == ()
    again.get_ready()
    assert bench.is_loaded
    assert again.header.value == first.header.value
    assert again.comparison.runs.methods.options
    assert "about " in again.evaluation.job.text.value
    press(again.evaluation.job)
    assert again.session.measured()["dataset"].tolist() == list(asked["corpora"])


def test_the_length_that_was_asked_for_is_used(asked):
    """In windows, in Python and in sessions, before and after the model is there."""
    panel, bench = opened(asked | {"seq_len": 32})
    assert panel.files._tests().seq_len == bench.profile.seq_len == 32
    panel.export.code.selected_index = 0
    assert "n_sequences=8, seq_len=32," in panel.export.code.text.value
    assert bench.load().profile == bench.profile


def test_the_model_waits_until_the_panel_is_seen(asked, monkeypatch):
    """To import torch holds up what the browser asks of the kernel."""
    opened(asked)
    panel, bench = opened(asked)
    ready = threading.Event()
    monkeypatch.setattr(keeping, "display", lambda *_, **__: None)
    monkeypatch.setattr(panel, "get_ready", ready.set)
    panel._ipython_display_()
    assert not ready.wait(0.2)
    panel.in_page.width = 1000
    assert ready.wait(2)
    assert not bench.is_loaded


class Shown(ipw.Label):
    """What stands for a panel."""

    begin = print


def test_a_page_says_how_far_the_scores_are(monkeypatch):
    """Those that are not in the cache are measured before its panel is shown."""
    there, told = threading.Event(), list[str]()

    def measure(_windows: Any, progress: Any) -> None:
        progress(4, 8)
        told.append(page.job.text.value)

    bench: Any = SimpleNamespace(name="moe", measure=measure)
    bench.calibration_set = lambda: SimpleNamespace(label="text", n_sequences=8)
    bench.load = lambda: there.wait(60) and bench
    monkeypatch.setattr(opening, "explore", lambda _: Shown())
    page = opening.Measuring(bench)
    there.set()
    page.job.wait(60)
    assert page.job.error.value == ""
    assert "scores on text: window: 4 of 8" in told[0]
    assert isinstance(page.children[0], Shown)


@contextlib.contextmanager
def waiting(job: Job, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Press a button; in the block its work waits for the model."""
    reached, go_on = threading.Event(), threading.Event()
    load = workbench.open_workbench

    def slow(*names: Any, **options: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return load(*names, **options)

    monkeypatch.setattr(workbench, "open_workbench", slow)
    job.button.click()
    assert reached.wait(60)
    yield
    go_on.set()
    job.wait(60)
    assert job.error.value == ""


def test_settings_are_those_of_the_press(asked, monkeypatch):
    """What moves while a job waits for the model is not what it measures or reads."""
    opened(asked)
    panel, _ = opened(asked)
    with waiting(panel.evaluation.job, monkeypatch):
        panel.controls.ratio.value = "0.5"
    assert panel.session.points["ratio"].tolist() == [0.0, 0.25]
    panel, _ = opened(asked)
    tab = panel.inspection
    tab.text.value = "aaab bbba"
    with waiting(tab.compare, monkeypatch):
        tab.text.value = "abab"
    assert "".join(tab.losses["token"]) == "aaab bbba"


def test_only_jobs_wait_for_the_model(asked):
    """And evaluations of before, which are checked with it."""
    first, _ = opened(asked)
    press(first.evaluation.job)
    panel, bench = opened(asked)
    with pytest.raises(SpecError, match="not loaded yet"):
        panel.files.replace(first.files.saved())
    assert not bench.is_loaded
    panel.get_ready()
    panel.files.replace(first.files.saved())
    assert len(panel.session.points) == 2


def test_a_corpus_that_is_gone_is_said(asked):
    """By Evaluate, if it was there at first; the model is there all the same."""
    opened(asked)
    gone = write_text(Path(asked["source"]).with_name("gone.txt"))
    panel, bench = opened(asked | {"corpora": (str(gone),)})
    gone.unlink()
    panel.get_ready()
    assert bench.is_loaded
    assert "loading" not in panel.evaluation.job.text.value
    assert "gone.txt" in error_of(panel.evaluation.job)


def test_another_model_of_the_same_name_is_noticed(asked):
    """Its files have changed, so that nothing is known; or its state has not."""
    opened(asked)
    folder = Path(asked["source"])
    (weights,) = folder.glob("*.safetensors")
    before = weights.stat()
    write_model(folder, seed=1)
    _, bench = opened(asked)
    assert bench.is_loaded
    _, bench = opened(asked)
    assert not bench.is_loaded
    write_model(folder, seed=2)
    with pytest.raises(SpecError, match="is not the model that the table"):
        bench.load()
    assert before.st_size == weights.stat().st_size


def test_a_damaged_memory_is_none(asked, session_cache):
    """The model is loaded, as without it."""
    opened(asked)
    for path in (session_cache / "openings").glob("*.json"):
        path.write_text("{")
    _, bench = opened(asked)
    assert bench.is_loaded
