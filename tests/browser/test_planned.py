"""In JupyterLab, what would take long is shown with its plan before it starts."""

import shutil
from pathlib import Path

import pytest
from browser.pages import N_ATOMS, TIMEOUT, Panel, Watch, nameless, run_all
from browser.servers import Lab

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.browser

LONG = """\
import os
os.environ["HEAPR_CACHE_DIR"] = {cache!r}
from heapr_lab import explore, open_workbench
from heapr_lab.streaming import plan
plan.LONG_SECONDS = -1  # everything takes longer
explore(open_workbench({model!r}, profile="small"),
        corpora=("pydocs",), tasks=())"""


def test_the_plan_comes_first_then_the_panel(
    chromium: "sync_api.Browser",
    tiny_model: Path,
    environment: dict[str, str],
    server: Lab,
    tmp_path: Path,
    shots: Path,
) -> None:
    """Nothing is measured before the button is pressed; the panel then replaces it."""
    cache = tmp_path / "cache"
    cell = LONG.format(model=str(tiny_model), cache=str(cache))
    context = chromium.new_context(viewport={"width": 1280, "height": 1400})
    page = context.new_page()
    watch = Watch.of(context, page)
    measured = shutil.ignore_patterns("importance")  # by tests that ran before
    shutil.copytree(environment["HEAPR_CACHE_DIR"], cache, ignore=measured)
    page.goto(server.notebook("planned", [cell]))
    run_all(page)
    panel = Panel(page.locator(".jp-Notebook .jp-Cell").first)
    measure = panel.button("Measure")
    expect(measure).to_be_visible(timeout=TIMEOUT)
    title = panel.root.get_by_text("Measuring the importance")
    expect(title.filter(visible=True)).to_have_count(1)
    assert panel.counts.count() == 0
    assert not list(tmp_path.rglob("importance/*.parquet"))
    assert nameless(panel.root) == []
    page.screenshot(path=shots / "planned.png")
    measure.click()
    panel.is_ready()
    assert panel.button("Measure").count() == 0
    panel.type_ratio("0.5")
    expect(panel.counts).to_contain_text(f"{N_ATOMS // 2} of {N_ATOMS} kept")
    page.screenshot(path=shots / "planned-then.png")
    assert watch.complaints == []
    context.close()
