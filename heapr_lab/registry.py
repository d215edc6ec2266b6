"""What the core finds by name, and others bring: imported when it is used.

The core imports nothing of what is around it. Where it needs more, it asks for it here;
`heapr_lab/__init__.py` registers what comes with the package.
"""

import importlib
from typing import Any

from heapr_lab.errors import SpecError

_PLACES: dict[str, str] = {}
_NEEDED: Any = object()


def register(name: str, place: str) -> None:
    """Let `name` stand for what is at `place`, as in `package.module:function`."""
    _PLACES[name] = place


def find(name: str, default: Any = _NEEDED) -> Any:
    """What is registered as `name`, or `default` where it is given and nothing is.

    Raises:
        SpecError: nothing is registered, or it is not installed.
    """
    module, _, attribute = _PLACES.get(name, "").partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError) as error:
        if default is not _NEEDED:
            return default
        raise SpecError(
            f"this needs {name}, which is not there ({module or 'not registered'}); "
            f"expected one of {', '.join(sorted(_PLACES))}"
        ) from error
