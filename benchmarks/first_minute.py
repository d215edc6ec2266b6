"""The first minute of a user, by the clock: the picture, what 25 % costs, a folder.

python -m benchmarks.first_minute [--models lab,smolmoe]

A real browser opens the panel, as the page that `heapr-lab app` serves and in a
notebook, and goes on there click by click, with what is chosen at first (25 %, masked
as in the paper). Scores are in the cache, and no answer is; models are not in memory:
each page has a kernel of its own. The results are in `results/first_minute.csv`.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.machine import RESULTS, machine, write_results
from heapr_lab.panel.opening import session_of
from heapr_lab.storage.paths import cache_dir
from heapr_lab.workbench.workbench import open_workbench

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser.pages import Panel, browser, expect
from browser.servers import CHROMIUM, lab, served
from playwright.sync_api import Browser, Locator, Page

LONGEST = 900_000
"""Milliseconds that a step may take."""
CACHED = ("importance", "models", "openings", "pydocs", "tokens")
"""What is in the cache: scores, and what they are made of."""
CELLS = (
    "from heapr_lab import explore\nexplore({model!r})",
    "from heapr_lab import load_model\nload_model('pruned')[0].num_parameters()",
)
STEPS = {
    "page": ("page, from the command to the picture", 0),
    "picture": ("notebook, from running its cell to the picture", 1),
    "answer": ("Evaluate, to what 25 % costs", 2),
    "folder": ("Export, to the smaller folder", 4),
    "reloaded": ("the folder loaded again, by another cell", 5),
}
"""What each step is, and the clicks up to its end."""


class Clock:
    """Seconds of each step, from the end of the one before."""

    def __init__(self) -> None:
        """Begin now."""
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Begin a step now."""
        self._began = time.perf_counter()

    def end(self, step: str) -> None:
        """End a step, from which the next begins."""
        now = time.perf_counter()
        self.seconds[step], self._began = now - self._began, now


def measure(model: str, chromium: Browser) -> dict[str, float]:
    """The seconds of each step, by its name in `STEPS`."""
    clock = Clock()
    with _scores_alone(model), tempfile.TemporaryDirectory() as folder:
        _page(model, chromium, clock, Path(folder))
    with (
        _scores_alone(model),
        tempfile.TemporaryDirectory() as folder,
        lab(private=Path(folder), environment={}) as server,
        _opened(chromium) as page,
    ):
        page.goto(server.notebook("minute", cells_of(model)))
        in_notebook(page, clock)
    return clock.seconds


@contextmanager
def _scores_alone(model: str) -> Iterator[None]:
    """A cache that has the scores of a model, those in the user's, and no answers."""
    kept = cache_dir().resolve()
    with tempfile.TemporaryDirectory() as folder:
        for kind in CACHED:
            (kept / kind).mkdir(parents=True, exist_ok=True)
            Path(folder, kind).symlink_to(kept / kind)
        with patch.dict(os.environ, HEAPR_CACHE_DIR=folder):
            session_of(open_workbench(model))
            yield


def cells_of(model: str) -> list[str]:
    """The cells of the notebook."""
    return [cell.format(model=model) for cell in CELLS]


@contextmanager
def _opened(chromium: Browser) -> Iterator[Page]:
    page = chromium.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(LONGEST)
    yield page
    page.close()


def _page(model: str, chromium: Browser, clock: Clock, folder: Path) -> None:
    """From the command to the picture in a browser that is open."""
    command = ["heapr_lab", "app", model, "--no-browser"]
    with _opened(chromium) as page:
        clock.begin()
        with served(command, private=folder, environment={}) as (address, _):
            page.goto(address)
            _painted(Panel(page.locator("body")))
            clock.end("page")


def in_notebook(page: Page, clock: Clock) -> None:
    """The steps in a notebook whose kernel is there."""
    bar = page.locator("#jp-main-statusbar")
    expect(bar).to_contain_text("| Idle", timeout=LONGEST)
    cells = page.locator(".jp-Notebook .jp-Cell")
    panel = Panel(cells.nth(0))
    clock.begin()
    _run(cells.nth(0))
    _painted(panel)
    clock.end("picture")
    status = panel.root.get_by_role("status", name="what pruning saves and costs")
    expect(panel.button("Evaluate")).to_be_enabled(timeout=LONGEST)
    panel.button("Evaluate").click()
    expect(status).to_contain_text("nats per token", timeout=LONGEST)
    clock.end("answer")
    panel.open("Export")
    panel.button("Export").click()
    written = panel.root.get_by_text("Written to pruned")
    expect(written).to_be_visible(timeout=LONGEST)
    clock.end("folder")
    _run(cells.nth(1))
    output = cells.nth(1).locator(".jp-OutputArea-output")
    expect(output).to_have_text(re.compile(r"^\d+$"), timeout=LONGEST)
    clock.end("reloaded")


def _painted(panel: Panel) -> None:
    """Wait for the counts and the picture."""
    expect(panel.counts).to_be_visible(timeout=LONGEST)
    panel.picture.evaluate("image => image.decode()")


def _run(cell: Locator) -> None:
    cell.locator(".cm-content").click()
    cell.page.keyboard.press("Shift+Enter")


def rows_of(model: str, chromium: Browser) -> list[dict[str, Any]]:
    """A row for each step of a model."""
    seconds = measure(model, chromium)
    return [
        {"model": model, "step": label, "clicks": clicks, "seconds": round(took, 2)}
        for name, (label, clicks) in STEPS.items()
        if (took := seconds.get(name)) is not None
    ]


def main() -> None:
    """Measure the models one after the other and write the results.

    Raises:
        SystemExit: there is no browser.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="lab,smolmoe")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit("found no chromium; install it: apt-get install chromium")
    with browser(CHROMIUM) as chromium:
        rows = [
            row for name in options.models.split(",") for row in rows_of(name, chromium)
        ]
    write_results("first_minute", rows, machine(), options.out)


if __name__ == "__main__":
    main()
