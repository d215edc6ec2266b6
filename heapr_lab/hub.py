"""Whether the hub can be reached: asked once, and remembered for the whole run.

A hub that is away is slow: its clients try each file five times, in every process. So
it is asked for a single page first, and where none comes the run goes on offline, as
with `HF_HUB_OFFLINE=1`, which processes started later inherit.
"""

import functools
import os
import sys
import threading
import urllib.error
import urllib.request

from huggingface_hub import constants

_SECONDS = 10.0
_REFUSED = (403, 407)
"""Answers of a proxy that lets nothing through."""


@functools.cache
def answers() -> bool:
    """Whether the hub can be reached, found in at most 10 seconds.

    With `HF_HUB_OFFLINE` nothing is tried.
    """
    if constants.is_offline_mode():
        return False
    found: list[bool] = []
    # In a thread, because looking up a name takes as long as the system likes.
    asking = threading.Thread(target=lambda: found.append(_asked()), daemon=True)
    asking.start()
    asking.join(_SECONDS)
    if found == [True]:
        return True
    _go_offline()
    return False


def _asked() -> bool:
    page = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(page, timeout=_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code not in _REFUSED
    except (OSError, ValueError):
        return False


def _go_offline() -> None:
    """Let the hub's clients, here and in processes to come, use what is on disk."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # it read the variable when it was imported
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
