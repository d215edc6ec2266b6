"""Whether the hub can be reached: found once, quickly, and remembered."""

import http.server
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import datasets
import pytest
from huggingface_hub import constants

from heapr_lab import hub, load_model
from heapr_lab.errors import CorpusError, SpecError
from heapr_lab.pretrained.wheel import offline_by_choice
from heapr_lab.text import corpora


class Server(http.server.ThreadingHTTPServer):
    """Counts what it is asked, and answers with `status` after `seconds`."""

    status = 200
    seconds = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []


class Answer(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.server.asked.append(self.path)
        time.sleep(self.server.seconds)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """A hub on this machine, which the variables do not forbid to ask."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv(hub.UNREACHABLE, "")
    hub.is_reachable.cache_clear()
    with Server() as here, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(
            constants, "ENDPOINT", f"http://127.0.0.1:{here.server_port}"
        )
        pool.submit(here.serve_forever)
        yield here
        here.shutdown()
    hub.is_reachable.cache_clear()


@pytest.mark.parametrize("status", [200, 404])
def test_a_hub_that_answers_is_asked_once(server, status):
    """The answer holds for the run, and leaves everything online.

    A mirror need not have a front page.
    """
    server.status = status
    assert hub.is_reachable()
    assert hub.is_reachable()
    assert len(server.asked) == 1
    assert not constants.is_offline_mode()
    assert os.environ["HF_HUB_OFFLINE"] == "0"


@pytest.mark.parametrize("status", [403, 407, 500, 503])
def test_a_proxy_that_refuses_is_no_hub(server, status):
    """The run goes on offline, in this process and in those that it starts."""
    server.status = status
    assert not hub.is_reachable()
    assert constants.is_offline_mode()
    assert datasets.config.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert not offline_by_choice()


def test_nothing_is_tried_where_the_variable_says_so(server, monkeypatch):
    """`HF_HUB_OFFLINE=1` needs no try."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub.is_reachable()
    assert offline_by_choice()
    assert server.asked == []


def test_a_hub_that_hangs_is_given_up(server, monkeypatch):
    """It is given up after the time that is set, which is at most ten seconds."""
    assert hub._SECONDS <= 10
    monkeypatch.setattr(hub, "_SECONDS", 0.3)
    server.seconds = 8.0
    started = time.perf_counter()
    assert not hub.is_reachable()
    assert time.perf_counter() - started < 6


def test_data_sets_of_a_hub_that_is_away_are_missed_at_once(server, monkeypatch):
    """One try serves all of them, and the error says what to do."""
    server.status = 503
    monkeypatch.delenv("HEAPR_DATA_DIR", raising=False)
    monkeypatch.setattr(corpora, "_not_on_hub", {})
    corpora._named_corpus.cache_clear()
    started = time.perf_counter()
    for name in ("wikitext2", "ptb", "c4"):
        with pytest.raises(CorpusError, match="Set the variable, or connect"):
            corpora.load_corpus(name, split="test")
    assert time.perf_counter() - started < 5
    assert len(server.asked) == 1


def test_a_model_of_a_hub_that_is_away_is_missed_at_once(server):
    """One try, then an error that names the model."""
    server.status = 503
    started = time.perf_counter()
    with pytest.raises(SpecError, match=r"no/such-model"):
        load_model("no/such-model")
    assert time.perf_counter() - started < 5
    assert len(server.asked) == 1
