"""A newcomer's first minutes, click by click: from `make lab` to a smaller model.

Nothing is prepared but a model in a folder, or the scores of the lab model. Every step
is a click, a key or a line that is typed, in the order in which somebody does them who
has read the README.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.pages import N_ATOMS, TIMEOUT, Panel, Watch, last_perplexity
from browser.servers import Lab

from heapr_lab import open_workbench
from heapr_lab.panel.loading import session_of

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.browser

OPEN = (
    "from heapr_lab import explore, open_workbench",
    "explore(open_workbench({model!r}, profile='small'), tasks=())",
)
RELOAD = (
    "from IPython.display import Markdown, display",
    "from heapr_lab import load_model",
    "smaller, tokenizer = load_model('smaller')",
    "display(Markdown('smaller/README.md'))",
    "f'{smaller.num_parameters():,} parameters are left'",
)


@pytest.fixture
def page(chromium: "sync_api.Browser", server: Lab) -> Iterator["sync_api.Page"]:
    """JupyterLab as `make lab` opens it: the launcher, and no notebook."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    watch = Watch.of(context, page)
    page.goto(server.page("newcomer"))
    yield page
    context.close()
    assert watch.complaints == []
    assert watch.requests == []


def run_cell(page: "sync_api.Page", number: int, lines: tuple[str, ...]) -> Panel:
    """Type lines into a cell and run it, which adds the next one; what it shows."""
    cell = page.locator(".jp-Notebook:visible .jp-Cell").nth(number)
    editor = cell.locator(".cm-content")
    editor.click()
    editor.fill("\n".join(lines))
    page.keyboard.press("Shift+Enter")
    return Panel(cell)


def test_from_nothing_to_a_smaller_model(
    page: "sync_api.Page", tiny_model: Path, server: Lab
) -> None:
    """Open, choose, see what it costs, save, load again, read what was measured."""
    page.locator(".jp-LauncherCard[data-category=Notebook]").first.click()
    expect(page.locator("#jp-main-statusbar")).to_contain_text("Idle", timeout=TIMEOUT)
    lines = tuple(line.format(model=str(tiny_model)) for line in OPEN)
    panel = run_cell(page, 0, lines)
    panel.is_ready()
    page.set_viewport_size({"width": 1000, "height": 700})
    expect(panel.handle).to_be_in_viewport()
    expect(panel.picture).to_be_in_viewport(ratio=0.99)
    page.set_viewport_size({"width": 1280, "height": 1000})

    panel.drag_to(0.5)  # how the picture changes while less is kept
    panel.type_ratio("0.5")
    expect(panel.counts).to_contain_text(f"{N_ATOMS // 2} of {N_ATOMS} kept")

    panel.open("Evaluate")
    panel.button("Evaluate").click()
    point = panel.root.get_by_text("Last point, ")
    expect(point).to_be_visible(timeout=TIMEOUT)
    expect(panel.button("Evaluate")).to_be_enabled()
    perplexity = last_perplexity(point.inner_text())

    panel.open("Export")
    panel.enter("folder", "smaller")
    panel.button("Export").click()
    written = panel.root.get_by_text("Written to smaller")
    expect(written).to_be_visible(timeout=TIMEOUT)

    shown = run_cell(page, 1, RELOAD)
    left = shown.root.locator(".jp-OutputArea").get_by_text("parameters are left")
    expect(left).to_be_visible(timeout=TIMEOUT)
    card = shown.root.locator(".jp-RenderedMarkdown")
    row = card.get_by_role("row")
    expect(row.filter(has_text="reloaded")).to_contain_text("Δ nll = 0.0000")
    measured = row.filter(has_text="perplexity of these weights, pydocs")
    expect(measured).to_contain_text(perplexity.replace(",", ""))
    manifest = server.work / "smaller" / "heapr_manifest.json"
    assert json.loads(manifest.read_text())["atoms_kept"] == N_ATOMS // 2


def test_the_first_minute(
    page: "sync_api.Page",
    server: Lab,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three clicks at most to what 25 % costs, and three to a smaller model."""
    from benchmarks.first_minute import STEPS, Clock, cells_of, in_notebook

    clicks: dict[str, int] = {}

    class Counting(Clock):
        def end(self, step: str) -> None:
            super().end(step)
            clicks[step] = page.evaluate("clicks")

    monkeypatch.setenv("HEAPR_CACHE_DIR", environment["HEAPR_CACHE_DIR"])
    session_of(open_workbench("lab"))
    page.add_init_script("clicks = 0; addEventListener('click', () => clicks++, true)")
    page.goto(server.notebook("minute", cells_of("lab")))
    clock = Counting()
    in_notebook(page, clock)
    assert clicks == {step: STEPS[step][1] for step in clicks}
    assert clicks["answer"] - clicks["picture"] <= 3
    assert clicks["reloaded"] - clicks["answer"] <= 3
    assert clock.seconds["answer"] < 30
    assert clock.seconds["folder"] + clock.seconds["reloaded"] < 60
