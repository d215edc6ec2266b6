"""Whether the hub can be reached: tried once, and remembered for the whole run.

An unreachable hub is slow: its clients try each file five times, in every process. So
a single page is requested first. If none arrives, the run continues offline, as with
`HF_HUB_OFFLINE=1`, which processes started later inherit.
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
"""Status codes of a proxy that blocks the hub."""
UNREACHABLE = "HEAPR_HUB_UNREACHABLE"
"""Set, with `HF_HUB_OFFLINE`, where the hub was tried and does not answer."""


@functools.cache
def is_reachable() -> bool:
    """Whether the hub can be reached; it takes at most 10 seconds to find out.

    With `HF_HUB_OFFLINE` set, no request is made.
    """
    if constants.is_offline_mode():
        return False
    answers: list[bool] = []
    # In a thread, because the system's look-up of a name has no time limit.
    asking = threading.Thread(target=lambda: answers.append(_asked()), daemon=True)
    asking.start()
    asking.join(_SECONDS)
    if answers == [True]:
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
    """Make the hub's clients, here and in later processes, use local files only."""
    os.environ["HF_HUB_OFFLINE"] = os.environ[UNREACHABLE] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # it read the variable when it was imported
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
