"""In JupyterLab too, what looks valid is valid, or is said to be out of date."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.pages import N_ATOMS, TIMEOUT, Panel, panels

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.browser


@pytest.fixture
def reset(page: "sync_api.Page") -> Iterator[Panel]:
    """The quick panel at the settings it began with, but for ratio and weights.

    It is left at them too, so that a test that fails does not fail the next.
    """
    panel, _ = panels(page)
    begin_again(panel)
    yield panel
    begin_again(panel)


def begin_again(panel: Panel) -> None:
    """Choose what the panel began with, half of the atoms, and masked weights."""
    panel.open("Choose")
    panel.unfold("Advanced")
    start = {"granularity": "atom", "structure": "ragged", "budget": "atoms"}
    for name, value in {"estimator": "heapr", "scope": "global", **start}.items():
        panel.choice(name).select_option(value)
    panel.mask()
    panel.enter("layers not pruned", "")
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


def test_inspections_are_marked_as_out_of_date(reset: Panel, shots: Path) -> None:
    """With another ratio or text; not once both are as they were."""
    reset.open("Inspect")
    text = reset.root.get_by_role("textbox", name="text")
    text.fill("aaab bbba abab")
    text.blur()
    reset.unfold("Where pruning")
    reset.button("Compare losses").click()
    hurt = reset.root.get_by_text("tokens hurt most")
    # The innermost box around the result, with what is said of it.
    inner = reset.root.page.get_by_text("tokens hurt most")
    shown = reset.root.locator(".widget-vbox").filter(has=inner).last
    settings = "heapr, 0.5 of the atoms, global scope, by atom, ragged, masked)"
    expect(shown).to_contain_text(settings, timeout=TIMEOUT)
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
