"""The pictures of the README: the panel on the lab model, in JupyterLab.

Made on request, for the text that everything is measured on has to be harvested:
HEAPR_SHOTS=figures/screens pytest -m browser tests/browser/test_screens.py
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.pages import TIMEOUT, Panel, opened, run_all
from browser.servers import lab
from playwright.sync_api import Page, expect

from heapr_lab import open_workbench

pytestmark = pytest.mark.skipif(
    "HEAPR_SHOTS" not in os.environ, reason="set HEAPR_SHOTS"
)

CELL = """\
from heapr_lab import explore

explore("lab")"""


WAYS = {
    "as the paper (masked)": "masked",
    "compensated (one forward pass)": "compensated",
}
"""What the list of weights offers, and how points are called."""


@pytest.fixture
def page(chromium, session_cache, tmp_path) -> Iterator[Page]:
    """The notebook, its table being in the cache, without the file browser."""
    open_workbench("lab").importance()
    silent = {"HEAPR_LAB_PROGRESS": "0"}
    with (
        lab(private=tmp_path, environment=silent) as server,
        opened(chromium, server.notebook("panels", [CELL]), height=900) as watch,
    ):
        page = watch.page
        run_all(page)
        page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
        yield page


def test_the_pictures_of_the_readme(page):
    """Choose, evaluate at three ratios, and look where pruning hurts a text."""
    shots = Path(os.environ["HEAPR_SHOTS"])
    panel = Panel(page.locator(".jp-Notebook .jp-Cell").first)
    panel.is_ready()
    panel.unfold("Advanced")
    panel.choice("estimator").select_option("fisher")
    panel.root.get_by_text("Advanced").click()
    panel.open("Evaluate")
    for option, way in WAYS.items():
        panel.choice("weights").select_option(option)
        for ratio in (0.2, 0.6, 0.4):
            panel.type_ratio(str(ratio))
            panel.button("Evaluate").click()
            told = panel.root.get_by_text(f"Last point, {way}: {ratio:.1%}")
            expect(told).to_be_visible(timeout=TIMEOUT)
            expect(panel.button("Evaluate")).to_be_enabled()
    panel.is_ready()
    page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
    page.screenshot(path=shots / "choose.png")
    page.set_viewport_size({"width": 1280, "height": 3000})
    output = panel.root.locator(".jp-OutputArea-output").first
    panel.open("Evaluate")
    panel.picture.evaluate("image => image.decode()")
    output.screenshot(path=shots / "evaluate.png")
    panel.open("Inspect")
    panel.unfold("Where pruning")
    panel.button("Compare losses").click()
    hurt = panel.root.get_by_text("tokens hurt most")
    expect(hurt).to_be_visible(timeout=TIMEOUT)
    output.screenshot(path=shots / "inspect.png")
