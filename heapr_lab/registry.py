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


def module_of(place: str) -> Any:
    """The module of that name, imported; None where it, or its package, was left out.

    Raises:
        ModuleNotFoundError: it is there, and a module that it imports is not.
    """
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if not f"{place}.".startswith(f"{error.name}."):
            raise
    return None


def find(name: str, default: Any = _NEEDED) -> Any:
    """What is registered as `name`, or `default` where it is given and nothing is.

    Also where the module that is registered was left out. One that is there and cannot
    be imported is an error, with or without a default.

    Raises:
        SpecError: nothing is registered, or its module is not there.
        ModuleNotFoundError: its module is there, and one that it imports is not.
    """
    place, _, attribute = _PLACES.get(name, "").partition(":")
    module = module_of(place) if place else None
    if module is not None:
        return getattr(module, attribute)
    if default is not _NEEDED:
        return default
    raise SpecError(
        f"this needs {name}, which is not there ({place or 'not registered'}); "
        f"expected one of {', '.join(sorted(_PLACES))}"
    )
