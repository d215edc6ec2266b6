"""The panel in JupyterLab, in a real browser: two of them in one notebook.

Starting a kernel takes far longer than any test, so all share one page.
"""

import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.pages import TIMEOUT, Panel, Watch, nameless, pixels, run_all
from browser.servers import lab_notebook
from transformers import AutoModelForCausalLM

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.browser

N_ATOMS = 2 * 4 * 8
"""Layers, experts, atoms of the tiny model."""
TABS = ("Choose", "Evaluate", "Inspect", "Compare", "Export")
N_PRESSES = 30
OPEN = """\
import dataclasses, time
from heapr_lab import explore, open_workbench
bench = open_workbench({model!r}, profile="small")
explore(bench, corpora=("pydocs", "missing.txt"), tasks=("continuation",))"""
SLOW = """\
slow = open_workbench({model!r}, profile="small")
slow.profile = dataclasses.replace(slow.profile, n_test=1000)
embedding = slow.model.get_input_embeddings()
quick = embedding.forward
embedding.forward = lambda ids: time.sleep(0.3) or quick(ids)
explore(slow, corpora=("pydocs",), tasks=())"""


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything is written."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture
def work(private: Path) -> Path:
    """The folder of the notebook."""
    return private / "notebooks"


@pytest.fixture(scope="module")
def address(
    tiny_model: Path, environment: dict[str, str], private: Path
) -> Iterator[str]:
    """JupyterLab with the notebook of two panels open."""
    cells = [source.format(model=str(tiny_model)) for source in (OPEN, SLOW)]
    with lab_notebook(cells, private=private, environment=environment) as found:
        yield found


@pytest.fixture(scope="module")
def watched(
    chromium: "sync_api.Browser", address: str
) -> Iterator[tuple["sync_api.Page", Watch]]:
    """The notebook in the browser, run from top to bottom."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1400})
    page = context.new_page()
    watch = Watch.of(context, page)
    page.goto(address)
    run_all(page)
    yield page, watch
    context.close()


@pytest.fixture
def page(watched: tuple["sync_api.Page", Watch]) -> Iterator["sync_api.Page"]:
    """The page, which must be clean after each test as well."""
    found, watch = watched
    for panel in panels(found):
        panel.is_ready()
    yield found
    assert watch.complaints == []
    assert watch.requests == []
    assert found.locator(".jp-Dialog, .Toastify__toast").count() == 0
    stderr = "[data-mime-type='application/vnd.jupyter.stderr']"
    assert found.locator(stderr).all_inner_texts() == []


def panels(page: "sync_api.Page") -> tuple[Panel, Panel]:
    """The quick panel and the slow one."""
    cells = page.locator(".jp-Notebook .jp-Cell")
    return Panel(cells.nth(0)), Panel(cells.nth(1))


def test_a_key_a_drag_and_typing_move_the_picture(page: "sync_api.Page") -> None:
    """Whatever the ratio is set by, counts and picture follow, and are those of it."""
    panel, _ = panels(page)
    panel.type_ratio("0.25")
    expect(panel.counts).to_contain_text(f"{N_ATOMS * 3 // 4} of {N_ATOMS} kept")
    first, shown = panel.source(), panel.pixels()
    panel.handle.focus()
    page.keyboard.press("End")
    panel.changes_from(first)
    assert panel.ratio_shown() > 0.9
    assert abs(panel.pixels() - shown).max() > 0.2
    passed = panel.drag_to(0.5)
    assert len(set(passed)) > 3, "the panel does not follow while the mouse is down"
    panel.type_ratio("0.25")
    expect(panel.counts).to_contain_text(f"{N_ATOMS * 3 // 4} of {N_ATOMS} kept")
    expect(panel.handle).to_have_attribute("aria-valuetext", "25")
    page.mouse.move(0, 0)
    assert abs(panel.pixels() - shown).max() == 0


def test_every_value_can_be_set_without_a_mouse(page: "sync_api.Page") -> None:
    """Tab reaches the handle and each control; arrows and typing set them."""
    panel, _ = panels(page)
    panel.type_ratio("0.5")
    panel.handle.focus()
    page.keyboard.press("ArrowRight")
    expect(panel.ratio).to_have_value("0.51")
    page.keyboard.press("Tab")
    expect(panel.ratio).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("0.75")
    page.keyboard.press("Tab")
    expect(panel.counts).to_contain_text(f"{N_ATOMS // 4} of {N_ATOMS} kept")
    expect(panel.choice("budget")).to_be_focused()
    page.keyboard.press("Tab")
    for name, letter, value in (
        ("estimator", "f", "fisher"),
        ("scope", "l", "layer"),
        ("granularity", "e", "expert"),
    ):
        expect(panel.choice(name)).to_be_focused()
        page.keyboard.press(letter)
        expect(panel.choice(name)).to_have_value(value)
        page.keyboard.press("Tab")
    expect(panel.counts).to_contain_text(f"{N_ATOMS // 4} of {N_ATOMS} kept")


def test_every_control_has_a_name(page: "sync_api.Page") -> None:
    """A screen reader can say what each input, list and button is."""
    panel, _ = panels(page)
    for tab in TABS:
        panel.open(tab)
        assert nameless(panel.root.locator(".jp-OutputArea-output")) == []


def test_the_numbers_are_one_click_away(page: "sync_api.Page") -> None:
    """Below the picture, a row for each layer."""
    panel, _ = panels(page)
    title = panel.root.get_by_text("Numbers of each layer")
    title.click()
    rows = panel.root.get_by_role("row").filter(has_text=re.compile(r"^\s*[01]\s"))
    expect(rows).to_have_count(2)
    title.click()


def test_evaluates(page: "sync_api.Page") -> None:
    """The button measures the dense and the pruned model, and shows both."""
    panel, _ = panels(page)
    panel.type_ratio("0.25")
    panel.open("Evaluate")
    panel.button("Evaluate").click()
    rows = panel.root.get_by_role("row").filter(has_text="pydocs")
    expect(rows).to_have_count(2, timeout=TIMEOUT)
    expect(rows.first).to_contain_text("dense")
    expect(panel.root.get_by_text("Last point, masked: 25.0%")).to_be_visible()
    expect(panel.button("Evaluate")).to_be_enabled()
    assert panel.pixels().std() > 0.01


def test_inspects_a_text(page: "sync_api.Page") -> None:
    """Where the text loses, who serves a token, and how both models go on."""
    panel, _ = panels(page)
    panel.type_ratio("0.5")
    panel.open("Inspect")
    panel.root.get_by_role("textbox", name="text").fill("aaab bbba abab")
    panel.button("Compare losses").click()
    expect(panel.root.get_by_text("tokens hurt most")).to_be_visible(timeout=TIMEOUT)
    panel.button("Show routing").click()
    expect(panel.root.get_by_role("table")).to_have_count(3, timeout=TIMEOUT)
    panel.button("Generate").click()
    expect(panel.button("Generate")).to_be_enabled(timeout=TIMEOUT)
    assert panel.root.get_by_role("alert").count() == 0


def test_compares_exports_and_reloads(page: "sync_api.Page", work: Path) -> None:
    """Two pins in one chart and as files; the model is written, and loads again."""
    panel, _ = panels(page)
    panel.open("Compare")
    for ratio in ("0.25", "0.5"):
        panel.type_ratio(ratio)
        panel.button("Pin").click()
    expect(panel.root.get_by_text("2 pinned. A: 25.0% removed")).to_be_visible()
    assert panel.pixels().std() > 0.01
    panel.button("Export comparison").click()
    expect(panel.root.get_by_text("Written to comparison")).to_be_visible()
    kinds = {path.suffix for path in (work / "comparison").iterdir()}
    assert kinds == {".csv", ".md", ".parquet", ".pdf", ".png", ".tex"}
    panel.open("Export")
    panel.root.get_by_role("checkbox", name="compensate").uncheck()
    panel.button("Export").click()
    expect(panel.root.get_by_text("Written to pruned")).to_be_visible(timeout=TIMEOUT)
    loaded = AutoModelForCausalLM.from_pretrained(work / "pruned")
    kept = sum(
        sum(module.heapr_widths)
        for module in loaded.modules()
        if hasattr(module, "heapr_widths")
    )
    assert kept == N_ATOMS // 2


def test_two_panels_at_once_and_cancel_in_the_middle(page: "sync_api.Page") -> None:
    """While one panel evaluates the other follows; Cancel ends the evaluation early."""
    panel, slow = panels(page)
    slow.open("Evaluate")
    slow.button("Evaluate").click()
    expect(slow.root.get_by_text(re.compile(r"about \d+:\d\d left"))).to_be_visible()
    ratio = slow.ratio_shown()
    panel.type_ratio("0.25")
    expect(panel.counts).to_contain_text("25.0% of")
    before = panel.source()
    panel.type_ratio("0.9")
    panel.changes_from(before)
    assert slow.ratio_shown() == ratio
    expect(slow.button("Evaluate")).to_be_disabled()
    slow.button("Cancel").click()
    expect(slow.root.get_by_text("cancelled")).to_be_visible()
    expect(slow.button("Evaluate")).to_be_enabled()
    expect(slow.root.get_by_role("row")).to_have_count(0)


def test_shows_an_error_and_goes_on(page: "sync_api.Page") -> None:
    """What cannot be evaluated is said in an alert, which goes with the next try."""
    panel, _ = panels(page)
    panel.open("Evaluate")
    corpora = panel.root.get_by_role("listbox", name="corpora")
    corpora.select_option("missing.txt")
    panel.button("Evaluate").click()
    alert = panel.root.get_by_role("alert")
    expect(alert).to_contain_text("missing.txt")
    corpora.select_option("pydocs")
    panel.button("Evaluate").click()
    expect(alert).to_have_count(0)
    expect(panel.button("Evaluate")).to_be_enabled(timeout=TIMEOUT)


@pytest.mark.parametrize("width", [1280, 1920])
@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_is_painted_in_both_themes(
    page: "sync_api.Page", theme: str, width: int, shots: Path
) -> None:
    """The panel is readable, and stays inside its window, in light and in dark."""
    page.set_viewport_size({"width": width, "height": 1400})
    use_theme(page, f"JupyterLab {theme}")
    panel, _ = panels(page)
    panel.is_ready()
    panel.counts.scroll_into_view_if_needed()
    background = pixels(page.locator(".jp-Notebook").screenshot()).mean()
    assert (background < 0.5) == (theme == "Dark")
    assert pixels(panel.counts.screenshot()).std() > 0.02
    output = panel.root.locator(".jp-OutputArea-output").first
    assert output.evaluate("node => node.scrollWidth <= node.clientWidth")
    page.screenshot(path=shots / f"lab-{theme.lower()}-{width}.png")


# --- what looks valid is valid ------------------------------------------------------


@pytest.fixture
def reset(page: "sync_api.Page") -> Iterator[Panel]:
    """The quick panel at the settings it began with, but for the ratio: 0.5.

    It is left at them too, so that a test that fails does not fail the next.
    """
    panel, _ = panels(page)
    begin_again(panel)
    yield panel
    begin_again(panel)


def begin_again(panel: Panel) -> None:
    """Choose what the panel began with, and half of the atoms."""
    panel.open("Choose")
    start = {"granularity": "atom", "structure": "ragged", "budget": "atoms"}
    for name, value in {"estimator": "heapr", "scope": "global", **start}.items():
        panel.choice(name).select_option(value)
    panel.enter("keep layers", "")
    panel.type_ratio("0.5")
    expect(panel.counts).to_contain_text(f"{N_ATOMS // 2} of {N_ATOMS} kept")


def wait_until_picture_is(panel: Panel, *, grey: bool) -> None:
    """Wait until the picture that is seen is grey, or in full colour."""
    opacity = "image => getComputedStyle(image).opacity"
    until = time.monotonic() + TIMEOUT / 1000
    while (float(panel.picture.evaluate(opacity)) < 0.5) != grey:
        assert time.monotonic() < until, f"the picture never was grey={grey}"
        panel.root.page.wait_for_timeout(50)


def test_ratios_are_taken_as_they_are_typed(reset: Panel, shots: Path) -> None:
    """40%, 0,4, 0.333 and 1e-3 are what they say; 40 is refused with a remedy."""
    for text, kept in (("25%", 48), ("0,4", 39), ("0.333", 43), ("1e-3", 64)):
        reset.enter("ratio", text)
        expect(reset.counts).to_contain_text(f"{kept} of {N_ATOMS} kept")
        expect(reset.ratio).to_have_value(text)
    reset.enter("ratio", "40")
    alert = reset.root.get_by_role("alert")
    expect(alert).to_contain_text("write 0.40 or 40% if you mean that")
    expect(reset.ratio).to_have_value("40")
    wait_until_picture_is(reset, grey=True)
    reset.root.screenshot(path=shots / "choose-stale.png")
    reset.handle.focus()
    reset.root.page.keyboard.press("ArrowRight")
    expect(alert).to_have_count(0)
    expect(reset.ratio).to_have_value("0.01")
    wait_until_picture_is(reset, grey=False)


def test_layers_that_are_none_are_refused(reset: Panel) -> None:
    """7-5 and 5- are errors, and the old picture is said to be out of date."""
    for text, why in (("7-5", "runs backwards"), ("5-", "cannot read")):
        reset.enter("keep layers", text)
        expect(reset.root.get_by_role("alert")).to_contain_text(why)
        expect(reset.root.get_by_text("Out of date: the picture")).to_be_visible()
        wait_until_picture_is(reset, grey=True)
        reset.open("Evaluate")
        reset.button("Evaluate").click()
        expect(
            reset.root.get_by_text("the settings above are infeasible")
        ).to_be_visible()
        reset.open("Choose")
    reset.enter("keep layers", "0")
    expect(reset.root.get_by_role("alert")).to_have_count(0)
    wait_until_picture_is(reset, grey=False)


def test_whole_experts_are_drawn_by_their_own_scores(reset: Panel, shots: Path) -> None:
    """The histogram is another one than that of atoms."""
    reset.root.page.wait_for_timeout(1000)  # pictures of earlier settings have come
    before = reset.source()
    reset.choice("granularity").select_option("expert")
    reset.changes_from(before)
    reset.root.screenshot(path=shots / "choose-experts.png")


def test_inspections_are_marked_as_out_of_date(reset: Panel, shots: Path) -> None:
    """With another ratio or text; not once both are as they were."""
    reset.open("Inspect")
    text = reset.root.get_by_role("textbox", name="text")
    text.fill("aaab bbba abab")
    text.blur()
    reset.button("Compare losses").click()
    hurt = reset.root.get_by_text("tokens hurt most")
    # The innermost box around the result, with what is said of it.
    inner = reset.root.page.get_by_text("tokens hurt most")
    shown = reset.root.locator(".widget-vbox").filter(has=inner).last
    own = "heapr, 0.5 of the atoms, global scope, by atom, ragged), masked"
    expect(shown).to_contain_text(own, timeout=TIMEOUT)
    told = shown.get_by_text("Out of date: made with other settings")
    expect(told).to_have_count(0)
    reset.type_ratio("0.8")
    expect(told).to_have_count(1)
    faded = "node => getComputedStyle(node.closest('.heapr-stale')).opacity"
    assert float(hurt.evaluate(faded)) < 0.5
    reset.root.screenshot(path=shots / "inspect-stale.png")
    reset.type_ratio("0.5")
    expect(told).to_have_count(0)
    text.fill("")
    text.blur()
    expect(told).to_have_count(1)


def test_choices_and_tasks_are_told_apart(reset: Panel, shots: Path) -> None:
    """Two structures and a task: measured, said so, and drawn one below the other."""
    reset.open("Evaluate")
    tasks = reset.root.get_by_role("listbox", name="tasks")
    tasks.select_option("continuation")
    for structure in ("uniform", "ragged"):
        reset.choice("structure").select_option(structure)
        reset.button("Evaluate").click()
        expect(reset.button("Evaluate")).to_be_enabled(timeout=TIMEOUT)
        rows = reset.root.get_by_role("row")
        named = re.compile(rf"continuation\s*heapr.*{structure}", re.DOTALL)
        expect(rows.filter(has_text=named).first).to_be_visible(timeout=TIMEOUT)
    expect(reset.root.get_by_text("Last point, masked: 50.0%")).to_be_visible()
    height = reset.picture.evaluate("image => image.naturalHeight")
    assert height == 680
    reset.root.screenshot(path=shots / "evaluate-two.png")
    tasks.select_option([])
    reset.open("Choose")
    expect(reset.root.get_by_text("Measured on pydocs: Δloss")).to_be_visible()
    reset.open("Compare")
    if reset.button("Clear").is_enabled():  # pins of another test
        reset.button("Clear").click()
    expect(reset.root.get_by_text("Nothing pinned yet")).to_be_visible()
    reset.button("Pin").click()
    expect(reset.root.get_by_text("1 pinned.")).to_be_visible()
    reset.type_ratio("0.25")
    reset.button("Pin").click()
    expect(reset.root.get_by_text("2 pinned.")).to_be_visible()
    reset.root.screenshot(path=shots / "compare-two.png")
    reset.button("Clear").click()


def test_a_gguf_file_that_failed_is_made_alone(
    reset: Panel, work: Path, shots: Path
) -> None:
    """The checkpoint is said to be there; the next press makes what is missing."""
    (work / "narrow.gguf").write_text("in the way")
    reset.choice("structure").select_option("uniform")
    reset.open("Export")
    folder = reset.root.get_by_role("textbox", name="folder")
    folder.fill("narrow")
    folder.blur()
    reset.root.get_by_role("checkbox", name="GGUF").check()
    reset.button("Export").click()
    alert = reset.root.get_by_role("alert")
    expect(alert).to_contain_text("is written to narrow", timeout=TIMEOUT)
    expect(reset.root.get_by_text("Written to narrow: ")).to_be_visible()
    reset.root.screenshot(path=shots / "export-gguf.png")
    (work / "narrow.gguf").unlink()
    reset.button("Export").click()
    for _ in range(TIMEOUT // 200):
        if (work / "narrow.gguf").is_file():
            break
        reset.root.page.wait_for_timeout(200)
    assert (work / "narrow.gguf").stat().st_size > 10_000
    expect(alert).to_have_count(0)
    expect(reset.button("Export")).to_be_enabled(timeout=TIMEOUT)
    reset.root.get_by_role("checkbox", name="GGUF").uncheck()
    reset.button("Export").click()
    expect(alert).to_contain_text("not empty")
    expect(reset.root.get_by_text("Written to narrow: ")).to_have_count(0)


def use_theme(page: "sync_api.Page", name: str) -> None:
    """Choose a theme, and wait for its colours."""
    command = (
        "name => jupyterapp.commands.execute('apputils:change-theme', {theme: name})"
    )
    page.evaluate(command, name)
    expect(page.locator("body")).to_have_attribute("data-jp-theme-name", name)


def test_every_key_gives_a_picture(page: "sync_api.Page") -> None:
    """Thirty presses, thirty pictures; how long each took is printed."""
    panel, _ = panels(page)
    panel.type_ratio("0.5")
    taken = panel.time_presses(["PageUp", "PageDown"] * (N_PRESSES // 2))
    expect(panel.ratio).to_have_value("0.5")
    median, worst = statistics.median(taken), statistics.quantiles(taken, n=20)[-1]
    told = f"key to picture: median {median:.0f} ms, 95 % within {worst:.0f} ms"
    print(told)  # noqa: T201 (seen with -s; a machine's speed is no claim to test)


def test_a_restarted_kernel_runs_the_panels_again(page: "sync_api.Page") -> None:
    """After a restart, panels made anew work; the old ones are gone."""
    panel, _ = panels(page)
    panel.type_ratio("0.6")
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name="Restart Kernel and Run All Cells").click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    expect(panel.ratio).to_have_value("0.25", timeout=TIMEOUT)
    panel.is_ready()
    before = panel.source()
    panel.type_ratio("0.5")
    panel.changes_from(before)
    expect(panel.counts).to_contain_text(f"{N_ATOMS // 2} of {N_ATOMS} kept")
