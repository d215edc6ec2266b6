"""A browser, a model and texts for the tests that drive the panel as people do."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser.pages import Watch, browser, opened, panels, run_all
from browser.servers import CHROMIUM, Lab, lab
from playwright.sync_api import Browser, Page
from tiny_folder import write_model

from heapr_lab.text import pydocs

_NO_BROWSER = (
    "NO BROWSER TEST WAS RUN: there is no chromium. Debian and Ubuntu have it: "
    "apt-get install chromium fonts-dejavu-core"
)
OPEN = """\
import dataclasses, time
from heapr_lab import explore, open_workbench
bench = open_workbench({model!r}, profile="small")
explore(bench, corpora=("pydocs",), tasks=("continuation",))"""
SLOW = """\
slow = open_workbench({model!r}, profile="small")
slow.profile = dataclasses.replace(slow.profile, n_test=1000)
embedding = slow.model.get_input_embeddings()
quick = embedding.forward
embedding.forward = lambda ids: time.sleep(0.3) or quick(ids)
explore(slow, corpora=("pydocs",), tasks=())"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the shared page run in one process, others file by file in any."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            shared = "watched" in getattr(item, "fixturenames", ())
            group = "page" if shared else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))
            item.add_marker(pytest.mark.browser)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly where the browser was not tested."""
    if CHROMIUM is None:
        terminalreporter.section("browser", red=True, bold=True)
        terminalreporter.line(_NO_BROWSER, red=True, bold=True)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    if CHROMIUM is None:
        pytest.skip(_NO_BROWSER)
    with browser(CHROMIUM) as chrome:
        yield chrome


@pytest.fixture
def visit(chromium) -> Iterator[Callable[..., Page]]:
    """Opens an address in a window of its own, which must be clean in the end."""
    with contextlib.ExitStack() as stack:
        yield (
            lambda *words, **options: (
                stack.enter_context(opened(chromium, *words, **options)).page
            )
        )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A tiny model in a folder."""
    return write_model(tmp_path_factory.mktemp("browser") / "moe")


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """What kernels see: a cache of their own, where `pydocs` is harvested already.

    The text is of one package: all of them take a minute, and it does not matter here.
    """
    cache = str(tmp_path_factory.mktemp("browser_cache"))
    harvest = pydocs.harvest
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEAPR_CACHE_DIR", cache)
        patch.setattr(pydocs, "harvest", lambda _: harvest(["networkx"]))
        pydocs.harvested.__wrapped__()
    return {"HEAPR_CACHE_DIR": cache}


@pytest.fixture(scope="session")
def server(environment, tmp_path_factory) -> Iterator[Lab]:
    """The JupyterLab of all tests."""
    private = tmp_path_factory.mktemp("lab")
    with lab(private=private, environment=environment) as jupyter:
        yield jupyter


@pytest.fixture(scope="session")
def address(server, tiny_model) -> str:
    """The notebook of two panels."""
    cells = [source.format(model=str(tiny_model)) for source in (OPEN, SLOW)]
    return server.notebook("panels", cells)


@pytest.fixture(scope="session")
def watched(chromium, address) -> Iterator[Watch]:
    """The notebook in the browser, run from top to bottom.

    Starting a kernel takes far longer than any test, so all share one page.
    """
    with opened(chromium, address, height=1400) as watch:
        run_all(watch.page)
        yield watch


@pytest.fixture
def page(watched) -> Iterator[Page]:
    """The page, which must be clean after each test as well."""
    for panel in panels(watched.page):
        panel.is_ready()
    yield watched.page
    watched.is_clean()
    assert watched.page.locator(".jp-Dialog, .Toastify__toast").count() == 0
