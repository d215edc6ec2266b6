"""With its table in the cache, a model is shown before it is loaded."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pressing import press
from tiny_folder import write_model, write_text

from heapr_lab.errors import SpecError
from heapr_lab.models import named
from heapr_lab.panel.loading import LoadingWorkbench
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.storage.cache import cached_folder
from heapr_lab.text.calibration_spec import Calibration

MOST_MODULES = 1_300
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
def asked(tmp_path: Path) -> dict[str, Any]:
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
    assert isinstance(panel, Explorer)
    bench: Any = panel.session.workbench
    assert isinstance(bench, LoadingWorkbench)
    return panel, bench


def test_nor_does_that_of_a_model_with_a_name(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is in the cache, made at first use."""

    def made() -> Path:
        return cached_folder("models", {"tiny": 1}, write_model, name="tinymoe")

    monkeypatch.setitem(named._FOLDERS, "tinymoe", made)
    for is_loaded in (True, False):
        _, bench = opened(asked | {"source": "tinymoe"})
        assert bench.is_loaded == is_loaded


def test_the_first_picture_needs_no_model(asked: dict[str, Any]) -> None:
    """Neither torch nor transformers is imported before it, nor much else."""
    first, bench = opened(asked)
    assert bench.is_loaded  # there was no table
    code = OPEN.format(model=asked["source"], text=asked["corpora"][0], slow={*SLOW})
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counts, slow = done.stdout.splitlines()
    n_known, n_modules = map(int, counts.split())
    assert slow == ""
    assert n_known == 2  # parameters and bytes
    assert n_modules < MOST_MODULES
    again, bench = opened(asked)
    assert not bench.is_loaded
    assert again.answers.value == first.answers.value
    assert "the model is loading" in again.header.value


def test_the_model_comes_behind(asked: dict[str, Any]) -> None:
    """Then all is as with a model that was there at once, and times are known."""
    first, _ = opened(asked)
    again, bench = opened(asked)
    assert again.comparison.runs.methods.options == ()
    again.get_ready()
    assert bench.is_loaded
    assert again.header.value == first.header.value
    assert again.comparison.runs.methods.options
    assert "at most " in again.evaluation.job.text.value
    press(again.evaluation.job)
    assert again.session.measured()["dataset"].tolist() == list(asked["corpora"])


def test_who_evaluates_before_waits(asked: dict[str, Any]) -> None:
    """The button needs no second press."""
    opened(asked)
    panel, bench = opened(asked)
    press(panel.evaluation.job)
    assert bench.is_loaded


def test_another_model_of_the_same_name_is_noticed(asked: dict[str, Any]) -> None:
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


def test_a_damaged_memory_is_none(asked: dict[str, Any], session_cache: Path) -> None:
    """The model is loaded, as without it."""
    opened(asked)
    for path in (session_cache / "openings").glob("*.json"):
        path.write_text("{")
    _, bench = opened(asked)
    assert bench.is_loaded
