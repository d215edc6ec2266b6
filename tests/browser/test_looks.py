"""Both themes, and windows from narrow to wide."""

from collections.abc import Iterator

import numpy as np
import pytest
from browser.pages import TABS, TIMEOUT, Panel, panels, pixels, use_theme, wait_until
from playwright.sync_api import Page, expect

_WIDE = "node => node.scrollWidth - node.clientWidth"


@pytest.fixture
def other(page) -> Iterator[Page]:
    """The page, whose theme and size are put back."""
    size = page.viewport_size
    use_theme(page, "JupyterLab Light")
    yield page
    use_theme(page, "JupyterLab Light")
    page.set_viewport_size(size)


def test_pictures_are_dark_in_a_dark_theme(other):
    """White becomes the grey of the page, and bars stay blue."""
    panel, _ = panels(other)
    light = with_blue_bars(panel)
    assert light.mean() > 0.8
    use_theme(other, "JupyterLab Dark")
    expect(panel.picture).to_have_css("filter", "invert(0.88) hue-rotate(180deg)")
    dark = panel.pixels()
    assert dark.mean() < 0.35
    assert blueness(dark)[blueness(light) > 0.5].mean() > 0.1


def test_what_is_out_of_date_is_grey(other):
    """The picture is, while what is typed cannot be selected."""
    panel, _ = panels(other)
    panel.enter("ratio", "40")
    expect(panel.picture).to_have_css("opacity", "0.35")
    panel.type_ratio("0.5")
    expect(panel.picture).to_have_css("opacity", "1")


def test_arrows_of_lists_are_seen_in_both_themes(other):
    """They differ from what they stand on."""
    panel, _ = panels(other)
    for theme in ("Light", "Dark"):
        use_theme(other, f"JupyterLab {theme}")
        fault = f"no arrow in the theme {theme}"
        wait_until(other, lambda: contrast_of_arrow(panel) > 0.3, fault)


def contrast_of_arrow(panel: Panel) -> float:
    """From the darkest to the lightest pixel at the end of a list, from 0 to 1."""
    end = pixels(panel.choice("weights").screenshot())[4:-4, -18:-4]
    return float(np.ptp(end.mean(axis=-1)))


def blueness(pixels: np.ndarray) -> np.ndarray:
    """Blue minus red of each pixel, from -1 to 1."""
    difference: np.ndarray = pixels[..., 2] - pixels[..., 0]
    return difference


def with_blue_bars(panel: Panel) -> np.ndarray:
    """The picture in full colour, which the test before may have left grey."""
    wait_until(
        panel.root.page,
        lambda: (blueness(panel.pixels()) > 0.5).sum() > 100,
        "no bar of the picture ever was blue",
    )
    return panel.pixels()


@pytest.mark.parametrize("width", [1000, 1280, 1920])
def test_nothing_is_cut(other, width):
    """No tab is wider than its place, so that nothing has to be scrolled sideways."""
    panel, _ = panels(other)
    other.set_viewport_size({"width": width, "height": 1400})
    for tab in TABS:
        panel.open(tab)
        boxes = panel.root.locator(".jp-OutputArea-output, .lm-TabPanel, .widget-tab")
        assert [box.evaluate(_WIDE) for box in boxes.all()] == [0] * boxes.count()
        page_of_tab = panel.root.locator(
            ".widget-tab-contents, .lm-TabPanel-stackedPanel"
        )
        for area in page_of_tab.all():
            assert area.evaluate(_WIDE) <= 0


def test_cancel_can_be_read(other):
    """However narrow the window, what is said of a job that runs leaves it room."""
    _, slow = panels(other)
    other.set_viewport_size({"width": 1000, "height": 1400})
    slow.button("Evaluate").click()
    cancel = slow.button("Cancel").filter(visible=True)
    expect(slow.root.get_by_text("dense on pydocs")).to_be_visible(timeout=TIMEOUT)
    assert cancel.evaluate(_WIDE) <= 0
    cancel.click()
    expect(slow.button("Evaluate")).to_be_enabled()


def test_the_picture_is_as_wide_as_a_wide_window(other):
    """It is drawn again, so that its text stays as large as that around it."""
    panel, _ = panels(other)
    other.set_viewport_size({"width": 1920, "height": 1400})
    panel.open("Choose")
    wide, picture = "image => image.naturalWidth > 1100", panel.picture
    fault = "the picture is as narrow as at first"
    wait_until(other, lambda: picture.evaluate(wide), fault)
