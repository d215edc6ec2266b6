"""What a person does with a panel in a browser, by the names that are on the screen."""

import contextlib
import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import numpy as np
from matplotlib.image import imread
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    expect,
    sync_playwright,
)

TIMEOUT = 180_000
"""Milliseconds for a kernel to import torch, on a busy machine."""
N_ATOMS = 2 * 4 * 8
"""Layers, experts, atoms of the tiny model."""
TABS = ("Choose", "Evaluate", "Inspect", "Compare", "Export")
_MILLISECONDS = 20_000
"""Each step takes part of a second; a busy machine is given time."""
_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    # Nothing off this machine has an address.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_LOCAL = re.compile(r"(https?|wss?)://127\.0\.0\.1[:/]")
_NETWORK = re.compile(r"(https?|wss?):")
_AXE = """root => axe.run(root, {
  runOnly: ["wcag2a", "wcag2aa"], resultTypes: ["violations"], elementRef: false
})"""
_COUNTS = re.compile(r"^\s*[\d.]+% of the atomic experts removed")
_TIME_ONE_PRESS = """
image => {
  const pressed = new Promise(done => document.addEventListener(
    'keydown', () => done(performance.now()), {once: true, capture: true}));
  const painted = new Promise((done, fail) => {
    image.addEventListener('load', () => requestAnimationFrame(
      () => requestAnimationFrame(() => done(performance.now()))), {once: true});
    setTimeout(() => fail(new Error('no new picture')), 20000);
  });
  window.heaprPress = Promise.all([pressed, painted]).then(([from, to]) => to - from);
}
"""


@contextlib.contextmanager
def browser(executable: str) -> Iterator[Browser]:
    """A browser without a window, which reaches this machine only."""
    expect.set_options(timeout=_MILLISECONDS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        yield chromium
        chromium.close()


@dataclass
class Watch:
    """What a page must not do: complain, or ask another machine for anything."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """With the addresses off this machine; the browser could not reach them."""

    def __post_init__(self) -> None:
        page = self.page
        page.context.on("request", lambda request: self._asked(request.url))
        page.on("websocket", lambda socket: self._asked(socket.url))
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def is_clean(self) -> None:
        """Check that it did neither, and that no cell of it has printed a warning."""
        assert self.complaints == []
        stderr = "[data-mime-type='application/vnd.jupyter.stderr']"
        assert self.page.locator(stderr).all_inner_texts() == []

    def _asked(self, url: str) -> None:
        if _NETWORK.match(url) and not _LOCAL.match(url):
            self.complaints.append(f"asked for {url}")

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} ({message.location.get('url')})")


@dataclass(frozen=True)
class Panel:
    """One panel: what can be moved in it and what it shows."""

    root: Locator

    @property
    def ratio(self) -> Locator:
        """The box with the ratio."""
        return self.root.get_by_role("textbox", name="ratio", exact=True)

    @property
    def handle(self) -> Locator:
        """What is dragged."""
        return self.root.get_by_role("slider", name="ratio", exact=True)

    @property
    def counts(self) -> Locator:
        """The line that says what is removed."""
        return self.root.get_by_role("status").filter(has_text=_COUNTS)

    @property
    def picture(self) -> Locator:
        """The picture of the tab that is open."""
        return self.root.locator("img:visible").first

    def open(self, tab: str) -> None:
        """Click a tab."""
        self.root.get_by_role("tab", name=tab, exact=True).click()

    def button(self, name: str) -> Locator:
        """The visible button of that name."""
        return self.root.get_by_role("button", name=name, exact=True)

    def choice(self, name: str) -> Locator:
        """The drop-down list of that name."""
        return self.root.get_by_role("combobox", name=name, exact=True)

    def unfold(self, title: str) -> None:
        """Open the section of that title, unless it is open."""
        header = self.root.locator(".jupyter-widget-Collapse-header")
        section = header.filter(has_text=title).filter(visible=True).locator("..")
        if "jupyter-widget-Collapse-open" not in str(section.get_attribute("class")):
            section.locator(".jupyter-widget-Collapse-header").click()

    def unfold_all(self, *, but: str = ":not(.jupyter-widget-Collapse-open)") -> None:
        """Open every section that is seen, and those in it."""
        header = f".jupyter-widget-Collapse{but} > .jupyter-widget-Collapse-header"
        closed = self.root.locator(header).filter(visible=True)
        while closed.count():
            closed.first.click()

    def fold_all(self) -> None:
        """Close every section that is seen."""
        self.unfold_all(but=".jupyter-widget-Collapse-open")

    def is_ready(self) -> None:
        """Wait until it shows counts and a picture, and that is painted."""
        failed = self.root.locator("[data-mime-type='application/vnd.jupyter.error']")
        expect(self.counts.or_(failed)).to_be_visible(timeout=TIMEOUT)
        expect(self.counts).to_be_visible()
        self.open("Choose")
        self.picture.scroll_into_view_if_needed()
        assert self.pixels().std() > 0.01, "the picture is there but nothing is painted"

    def pixels(self) -> np.ndarray:
        """The picture as it is on the screen, once it is loaded."""
        self.picture.evaluate("image => image.decode()")
        return pixels(self.picture.screenshot())

    def source(self) -> str:
        """The address of the picture, which is another one for each picture."""
        return str(self.picture.get_attribute("src"))

    def changes_from(self, source: str) -> None:
        """Wait until another picture than `source` is shown and loaded."""
        expect(self.picture).not_to_have_attribute("src", source)
        self.picture.evaluate("image => image.decode()")

    def ratio_shown(self) -> float:
        """The share of atoms that goes, as the line with the counts says it."""
        match = re.match(r"\s*([\d.]+)%", self.counts.inner_text())
        assert match is not None
        return float(match[1]) / 100

    def type_ratio(self, text: str) -> None:
        """Type a ratio into the box, and wait until the slider follows."""
        self.ratio.fill(text)
        self.ratio.press("Enter")
        # The slider has steps of one per cent.
        follows = """([node, value]) =>
            Math.abs(node.getAttribute('aria-valuetext') / 100 - value) < 0.006"""
        pair = [self.handle.element_handle(), float(text)]
        self.root.page.wait_for_function(follows, arg=pair)
        expect(self.ratio).to_have_value(text)

    def enter(self, name: str, text: str) -> None:
        """Type into the box of that name, and press Enter."""
        box = self.root.get_by_role("textbox", name=name, exact=True)
        box.fill(text)
        box.press("Enter")

    def drag_to(self, share: float) -> list[float]:
        """Drag the handle to `share` of its track; the ratios that were shown."""
        page, shown = self.root.page, []
        self.handle.scroll_into_view_if_needed()
        handle = self.handle.bounding_box()
        track = self.root.locator(".widget-slider .noUi-base").first.bounding_box()
        assert handle is not None
        assert track is not None
        x, y = (handle[a] + handle[b] / 2 for a, b in (("x", "width"), ("y", "height")))
        page.mouse.move(x, y)
        page.mouse.down()
        for step in range(1, 11):
            goal = track["x"] + track["width"] * share
            page.mouse.move(x + (goal - x) * step / 10, y)
            page.wait_for_timeout(50)
            shown.append(self.ratio_shown())
        page.mouse.up()
        # What was typed before the last move arrived would be overwritten by it.
        value = float(str(self.handle.get_attribute("aria-valuetext")))
        expect(self.ratio).to_have_value(f"{value / 100:g}")
        return shown

    def time_presses(self, keys: Sequence[str]) -> list[float]:
        """Press keys on the handle; milliseconds until each new picture is painted."""
        self.handle.focus()
        taken = []
        for key in keys:
            # Begun before the key goes down, so that no picture is missed.
            self.picture.evaluate(_TIME_ONE_PRESS)
            self.root.page.keyboard.press(key)
            taken.append(float(self.root.page.evaluate("window.heaprPress")))
        return taken


@contextlib.contextmanager
def opened(chrome: Browser, address: str, *, height: int = 1000) -> Iterator[Watch]:
    """A page in a window of its own, which must be clean in the end."""
    context = chrome.new_context(viewport={"width": 1280, "height": height})
    watch = Watch(context.new_page())
    watch.page.goto(address, timeout=TIMEOUT)
    yield watch
    watch.is_clean()
    context.close()


def wait_until(page: Page, shown: Callable[[], bool], fault: str) -> None:
    """Look again until a picture, which is painted later, is as it must be."""
    until = time.monotonic() + TIMEOUT / 1000
    while not shown():
        assert time.monotonic() < until, fault
        page.wait_for_timeout(50)


def run_all(page: Page) -> None:
    """Run all cells of JupyterLab's notebook, once its kernel answers.

    What is asked of it before is lost.
    """
    bar = page.locator("#jp-main-statusbar")
    expect(bar).to_contain_text("| Idle", timeout=TIMEOUT)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def pixels(png: bytes) -> np.ndarray:
    """Red, green and blue of a PNG, from 0 to 1."""
    array: np.ndarray = imread(io.BytesIO(png))[..., :3]
    return array


def violations(root: Locator) -> list[str]:
    """What axe-core finds in `root` of WCAG 2 A and AA, serious or worse."""
    script = files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")
    root.page.evaluate(script)
    report = root.evaluate(_AXE)
    return [
        f"{rule['id']}: {node['html'][:200]}"
        for rule in report["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def panels(page: Page) -> tuple[Panel, Panel]:
    """The quick panel and the slow one."""
    cells = page.locator(".jp-Notebook .jp-Cell")
    return Panel(cells.nth(0)), Panel(cells.nth(1))


def use_theme(page: Page, name: str) -> None:
    """Choose a theme, and wait for its colours.

    JupyterLab shows its logo meanwhile, and bears no other change before it goes.
    """
    command = (
        "name => jupyterapp.commands.execute('apputils:change-theme', {theme: name})"
    )
    page.evaluate(command, name)
    expect(page.locator("body")).to_have_attribute("data-jp-theme-name", name)
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)
