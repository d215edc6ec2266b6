"""The panel in JupyterLab, in a real browser: two of them in one notebook."""

import re

import pytest
from browser.pages import N_ATOMS, TABS, panels, use_theme, violations
from playwright.sync_api import expect

DEFAULTS = {"estimator": "heapr", "scope": "global", "granularity": "atom"}


def test_a_key_a_drag_and_typing_move_the_picture(page):
    """Whatever the ratio is set by, counts and picture follow, and are those of it."""
    panel, _ = panels(page)
    kept = f"{N_ATOMS * 3 // 4} of {N_ATOMS} kept"
    panel.type_ratio("0.25")
    expect(panel.counts).to_contain_text(kept)
    first, shown = panel.source(), panel.pixels()
    panel.handle.press("End")
    expect(panel.counts).not_to_contain_text(kept)
    assert panel.source() != first
    assert panel.ratio_shown() > 0.9
    assert abs(panel.pixels() - shown).max() > 0.2
    passed = panel.drag_to(0.5)
    assert len(set(passed)) > 3, "the panel does not follow while the mouse is down"
    panel.type_ratio("0.25")
    expect(panel.counts).to_contain_text(kept)
    expect(panel.handle).to_have_attribute("aria-valuetext", "25")
    page.mouse.move(0, 0)
    # Not 0: the page may have moved by a part of a pixel.
    assert abs(panel.pixels() - shown).max() < 0.1


def test_every_value_can_be_set_without_a_mouse(page):
    """Tab reaches the handle and each control; arrows and typing set them."""
    panel, _ = panels(page)
    panel.type_ratio("0.5")
    panel.handle.press("ArrowRight")
    expect(panel.ratio).to_have_value("0.51")
    page.keyboard.press("Tab")
    expect(panel.ratio).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("0.75")
    page.keyboard.press("Tab")
    expect(panel.counts).to_contain_text(f"{N_ATOMS // 4} of {N_ATOMS} kept")
    expect(panel.choice("weights")).to_be_focused()
    panel.unfold("Advanced")
    panel.choice("estimator").focus()
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
    for name, value in DEFAULTS.items():
        panel.choice(name).select_option(value)


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_what_is_folded_is_opened_with_keys(page, key):
    """Advanced, numbers and Help are reached with Tab, named, and say whether open."""
    panel, _ = panels(page)
    panel.fold_all()
    panel.button("Evaluate").focus()
    page.keyboard.press("Tab")
    expect(panel.button("Advanced")).to_be_focused()
    for title in ("Advanced", "All numbers", "Help: what each control and term means"):
        panel.button(title).focus()
        for expanded in ("true", "false"):
            page.keyboard.press(key)
            expect(panel.button(title)).to_have_attribute("aria-expanded", expanded)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_axe_finds_nothing_serious(page, theme):
    """On any tab, with the picture and every section open, in either theme."""
    pytest.importorskip("axe_core_python")
    panel, _ = panels(page)
    panel.type_ratio("0.5")
    use_theme(page, theme)
    faults = []
    for tab in TABS:
        panel.open(tab)
        panel.unfold_all()
        output = panel.root.locator(".jp-OutputArea-output").first
        part = output if tab == "Choose" else output.locator(".widget-tab")
        faults += [f"{tab}: {fault}" for fault in violations(part)]
        panel.fold_all()
    use_theme(page, "JupyterLab Light")
    assert not faults, "\n".join(sorted(set(faults)))


@pytest.mark.parametrize("stopped_by", ["Cancel", "an interrupt of the kernel"])
def test_two_panels_at_once_and_cancel_in_the_middle(page, stopped_by):
    """While one panel evaluates the other follows; what is stopped ends early."""
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
    if stopped_by == "Cancel":
        slow.button("Cancel").first.click()  # the other is that of Sweep
    else:
        page.evaluate("jupyterapp.commands.execute('kernelmenu:interrupt')")
    expect(slow.root.get_by_text("cancelled")).to_be_visible()
    expect(slow.button("Evaluate")).to_be_enabled()
    expect(slow.root.get_by_role("row")).to_have_count(0)
