"""A browser, a model and texts for the tests that drive the panel as people do."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser.servers import CHROMIUM
from tiny_folder import write_model

from heapr_lab.text import pydocs

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NO_BROWSER = (
    "NO BROWSER TEST WAS RUN: there is no chromium. Debian and Ubuntu have it: "
    "apt-get install chromium fonts-dejavu-core"
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly where the browser was not tested."""
    if CHROMIUM is None:
        terminalreporter.section("browser", red=True, bold=True)
        terminalreporter.line(_NO_BROWSER, red=True, bold=True)


@pytest.fixture(scope="session")
def chromium() -> Iterator["Browser"]:
    """A browser without a window."""
    if CHROMIUM is None:
        pytest.skip(_NO_BROWSER)
    from browser.pages import browser

    with browser(CHROMIUM) as found:
        yield found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder."""
    return write_model(tmp_path_factory.mktemp("browser") / "moe")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What kernels see: a cache of their own, where `pydocs` is harvested already.

    Of one package: all of them take a minute, and the text does not matter here.
    """
    cache = str(tmp_path_factory.mktemp("browser_cache"))
    harvest = pydocs.harvest
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEAPR_CACHE_DIR", cache)
        patch.setattr(pydocs, "harvest", lambda _: harvest(["networkx"]))
        pydocs.harvested.__wrapped__()
    return {"HEAPR_CACHE_DIR": cache}


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: `$HEAPR_SHOTS`, else a temporary folder."""
    folder = os.environ.get("HEAPR_SHOTS")
    path = Path(folder) if folder else tmp_path_factory.mktemp("shots")
    path.mkdir(parents=True, exist_ok=True)
    return path
