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

    Also where the module that is registered was left out. One that is there and cannot
    be imported is an error, with or without a default.

    Raises:
        SpecError: nothing is registered, or its module is not there.
        ModuleNotFoundError: its module is there, and one that it imports is not.
    """
    module, _, attribute = _PLACES.get(name, "").partition(":")
    missing = None
    if module:
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            missing = error
    if default is not _NEEDED:
        return default
    raise SpecError(
        f"this needs {name}, which is not there ({module or 'not registered'}); "
        f"expected one of {', '.join(sorted(_PLACES))}"
    ) from missing
