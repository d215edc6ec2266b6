"""In JupyterLab, a panel opens as it was left; and why pruning hurts."""

import json
from pathlib import Path

from browser.pages import TIMEOUT, Panel, run_all
from playwright.sync_api import expect

OPEN = """\
import os
os.environ["HEAPR_LAB_RESUME"] = "1"
from heapr_lab import explore, open_workbench
explore(open_workbench({model!r}, profile="small"), corpora=("pydocs",), tasks=())"""


def test_a_panel_opens_as_it_was_left(visit, tiny_model, environment, server):
    """With its pins and evaluations, after the kernel is gone; and back."""
    cell = OPEN.format(model=str(tiny_model))
    page = visit(server.notebook("resume", [cell]), height=1400)
    cache = Path(environment["HEAPR_CACHE_DIR"])
    run_all(page)
    panel = Panel(page.locator(".jp-Notebook .jp-Cell").first)
    panel.is_ready()
    panel.type_ratio("0.5")
    explain(panel)
    panel.open("Compare")
    panel.button("Pin").click()
    expect(panel.root.get_by_text("1 pinned.")).to_be_visible()
    panel.open("Evaluate")
    panel.button("Evaluate").click()
    expect(panel.root.get_by_text("Last point, ")).to_be_visible(timeout=TIMEOUT)
    page.wait_for_timeout(3000)  # it is kept a second after the last change
    kept = cache.glob("sessions/*/*.json")
    file = max(kept, key=lambda path: path.stat().st_mtime)
    assert len(json.loads(file.read_text())["points"]) == 2

    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name="Restart Kernel and Run All Cells").click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    offer = panel.root.get_by_text("A session of this table is kept")
    expect(offer).to_be_visible(timeout=TIMEOUT)
    panel.is_ready()
    expect(panel.ratio).to_have_value("0.25")
    panel.button("Resume").click()
    expect(offer).to_be_hidden()
    expect(panel.ratio).to_have_value("0.5")
    expect(panel.root.get_by_text("measured").first).to_be_visible()
    panel.open("Compare")
    expect(panel.root.get_by_text("1 pinned.")).to_be_visible()
    panel.button("Undo").last.click()
    expect(panel.ratio).to_have_value("0.25")
    expect(panel.root.get_by_text("Nothing pinned yet")).to_be_visible()


def explain(panel: Panel) -> None:
    """Ask why a text loses."""
    panel.open("Inspect")
    panel.root.get_by_role("textbox", name="text").fill("aaab bbba abab")
    panel.unfold("Why it hurts")
    panel.button("Attribute").click()
    expect(panel.button("Attribute")).to_be_enabled(timeout=TIMEOUT)
    expect(panel.root.get_by_text("first order").first).to_be_visible()
    assert panel.root.get_by_role("alert").count() == 0
