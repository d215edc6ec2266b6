"""What every test runs under: offline, one thread, silent, a cache of its own."""

import gc
import os
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Set before anything imports torch, transformers or matplotlib, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HEAPR_LAB_PROGRESS"] = "0"
os.environ["HEAPR_LAB_RESUME"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
# To start threads takes longer than what they would read of a tiny model.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

_SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
for _name, _folder in {
    "HEAPR_DATA_DIR": "text",
    "HEAPR_TASKS_DIR": "zero_shot",
}.items():
    if (_SHARED / _folder).is_dir():
        os.environ.setdefault(_name, str(_SHARED / _folder))

# Time limits per example would measure the machine; fixed examples keep a run the same.
hypothesis.settings.register_profile(
    "house", deadline=None, derandomize=True, max_examples=50
)
hypothesis.settings.load_profile("house")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported meanwhile stays, and no garbage collection looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup() -> None:
    """Random numbers of torch do not depend on the tests that ran before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_runtest_teardown() -> None:
    """What a test has asked for later does not happen, and print, in another test."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Any:
    """One token for each byte, and a special one, 0."""
    from tiny_folder import write_tokenizer
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder of the test's own, which is not made yet."""
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True, scope="session")
def session_cache(tmp_path_factory) -> Iterator[Path]:
    """A cache folder that lives as long as the session."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEAPR_CACHE_DIR", str(folder))
        yield folder
