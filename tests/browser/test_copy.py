"""What a saved notebook shows in JupyterLab once the kernel of a panel is gone."""

import shutil

import nbformat
from browser.pages import TIMEOUT, Panel, pixels, run_all
from browser.servers import lab
from playwright.sync_api import Page, expect
from random_tables import small_table

from heapr_lab.panel.keeping import CLASS

CELL = "from heapr_lab import explore\nexplore('table.parquet')"


def shows_the_copy(page: Page) -> None:
    """The numbers and the picture are on the screen, without a widget."""
    copy = page.locator(f".{CLASS}")
    expect(copy).to_be_visible(timeout=TIMEOUT)
    row = copy.get_by_role("row", name="atomic experts")
    expect(row).to_contain_text("75.0%")
    assert pixels(copy.locator("img").screenshot()).std() > 0.01
    expect(page.get_by_role("textbox", name="ratio")).to_have_count(0)


def test_the_copy_is_seen_once_the_kernel_is_gone(chromium, server, tmp_path):
    """Hidden beside the panel and following it; seen afterwards, by strangers too."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    page.goto(server.notebook("copy", [CELL]))
    small_table().write(server.folder("copy") / "table.parquet")
    run_all(page)
    panel = Panel(page.locator(".jp-Notebook .jp-Cell").first)
    panel.is_ready()
    expect(page.locator(f".{CLASS}")).to_be_hidden()
    panel.type_ratio("0.75")
    copy = page.locator(f".{CLASS}").filter(has_text="75.0%")
    expect(copy).to_have_count(1)
    expect(copy).to_be_hidden()
    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    notebook = nbformat.read(server.folder("copy") / "copy.ipynb", as_version=4)
    copied = notebook.cells[0].outputs[-1].data["text/plain"]
    assert "pruned 4, saved 75.0%" in copied
    page.reload()  # the kernel has the panel still
    panel.is_ready()
    expect(page.locator(f".{CLASS}")).to_be_hidden()
    page.evaluate("jupyterapp.commands.execute('kernelmenu:shutdown')")
    page.reload()
    shows_the_copy(page)
    with lab(private=tmp_path, environment={}) as other:
        shutil.copy2(server.folder("copy") / "copy.ipynb", other.work)
        page.goto(other.page("copy", "/tree/copy.ipynb"))
        shows_the_copy(page)
    context.close()
