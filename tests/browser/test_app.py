"""The panel as a page of its own, which `heapr-lab app` serves."""

import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from browser.pages import N_ATOMS, TIMEOUT, Panel, pixels, violations
from browser.servers import served, stop
from playwright.sync_api import expect

App = tuple[str, "subprocess.Popen[bytes]", Path]
"""Its address and process, and where its temporary files go."""


@pytest.fixture(scope="module")
def app(tiny_model, environment, tmp_path_factory) -> Iterator[App]:
    """The app, as it runs."""
    pytest.importorskip("voila")
    private = tmp_path_factory.mktemp("app")
    command = ["heapr_lab", "app", str(tiny_model), "--profile", "small"]
    command.append("--no-browser")
    # The path of a socket has to be short.
    with tempfile.TemporaryDirectory(prefix="hl-") as temporary:
        variables = environment | {"TMPDIR": temporary, "HEAPR_LAB_RESUME": "1"}
        with served(command, private=private, environment=variables) as running:
            yield *running, Path(temporary)
    # Other tests use the same table, and would be offered these.
    shutil.rmtree(Path(environment["HEAPR_CACHE_DIR"], "sessions"))


def test_a_closed_page_ends_its_kernel(chromium, app):
    """Each page has one; the second says that the model is loaded again."""
    address, process, _ = app
    context = chromium.new_context()
    for before in (0, 1):
        page = context.new_page()
        page.goto(address, timeout=TIMEOUT)
        Panel(page.locator("body")).is_ready()
        again = page.get_by_text("memory of its files once more, 6")  # 6x kB
        expect(again).to_have_count(before)
    kernels = psutil.Process(process.pid).children()
    assert len(kernels) == 2
    for page in context.pages:
        page.close(run_before_unload=True)
    assert psutil.wait_procs(kernels, timeout=TIMEOUT / 1000)[1] == []


def test_notices_leave_the_picture_in_sight(visit, app):
    """At 1000 × 700 and 150 %, an earlier session and a second page are said below."""
    for ratio in ("0.5", "0.4"):
        page = visit(app[0])
        panel = Panel(page.locator("body"))
        panel.is_ready()
        panel.type_ratio(ratio)
        page.wait_for_timeout(3000)  # it is kept a second after the change
    page.set_viewport_size({"width": 667, "height": 467})
    for seen in (panel.handle, panel.picture):
        expect(seen).to_be_in_viewport(ratio=0.99)
    for notice in ("is open in another page", "of this table (is|are) kept"):
        expect(page.get_by_text(re.compile(notice))).to_be_visible()


def test_the_app_shows_the_panel(visit, app):
    """It follows keys and typing, evaluates, and stays local."""
    page = visit(f"{app[0]}&theme=dark")
    panel = Panel(page.locator("body"))
    panel.is_ready()
    assert page.locator(".jp-InputArea-editor").count() == 0
    for width, height in ((1000, 700), (667, 467)):  # the second is it at 150 %
        page.set_viewport_size({"width": width, "height": height})
        for seen in (panel.handle, panel.picture):
            expect(seen).to_be_in_viewport(ratio=0.99)
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert pixels(page.screenshot())[:, 0].mean() < 0.5
    before, ratio = panel.source(), panel.ratio.input_value()
    panel.handle.press("PageUp")
    # Another size of the page is another picture, too.
    expect(panel.ratio).not_to_have_value(ratio)
    panel.changes_from(before)
    panel.type_ratio("0.5")
    expect(panel.counts).to_contain_text(f"{N_ATOMS // 2} of {N_ATOMS} kept")
    panel.choice("weights").select_option("best (about 4 forward passes)")
    expect(panel.root.get_by_text("not known yet: compress")).to_be_visible()
    panel.open("Evaluate")
    panel.root.get_by_role("listbox", name="corpora").select_option("pydocs")
    panel.button("Evaluate").click()
    told = re.compile(r"Last point, compress.*: 50\.0%")
    expect(panel.root.get_by_text(told)).to_be_visible(timeout=TIMEOUT)
    panel.open("Inspect")
    assert violations(panel.root) == []


def test_only_this_machine_and_only_with_the_token(app):
    """It listens on 127.0.0.1 alone, and shows nothing to those without the token."""
    address, process, _ = app
    connections = psutil.Process(process.pid).net_connections("tcp")
    listening = {socket.laddr.ip for socket in connections if socket.status == "LISTEN"}
    assert listening == {"127.0.0.1"}
    for without in (address.partition("?")[0], f"{address}x"):
        with urllib.request.urlopen(without) as answer:
            assert "/login?" in answer.url


def test_leaves_nothing_behind(app):
    """Told to stop, it ends well and takes its notebook with it."""
    _, process, temporary = app
    assert list(temporary.glob("heapr-lab-*/heapr-lab.ipynb"))
    assert list(temporary.rglob("kernel-*-ipc-1"))
    stop(process)
    assert process.returncode == 0
    assert list(temporary.glob("heapr-lab-*")) == []
