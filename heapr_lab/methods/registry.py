"""Every method by name: those of this package, and those that plug-ins add."""

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from heapr_lab.errors import SpecError
from heapr_lab.methods import GROUP, OURS
from heapr_lab.methods.method import Method


def all_methods() -> Mapping[str, Method]:
    """The methods by name, ours first.

    Raises:
        SpecError: a plug-in cannot be loaded, is no `Method`, or its name is taken (the
            distribution is named).
    """
    ours = {method.name: method for place in {*OURS.values()} for method in _in(place)}
    methods = {name: ours[name] for name in OURS}
    made_by = dict.fromkeys(methods, "heapr-lab")
    for entry in sorted(entry_points(group=GROUP), key=_place):
        method = _loaded(entry)
        if method.name in methods:
            raise SpecError(
                f"{_place(entry)} adds a method called {method.name!r}, which "
                f"{made_by[method.name]} has already: give it another name, or "
                "uninstall one of them"
            )
        methods[method.name] = method
        made_by[method.name] = _place(entry)
    return MappingProxyType(methods)


def _in(place: str) -> Iterator[Method]:
    """The methods that a module has names for, alone or in a tuple."""
    module = importlib.import_module(f"{__package__}.{place}")
    for value in vars(module).values():
        values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        yield from (one for one in values if isinstance(one, Method))


def _place(entry: EntryPoint) -> str:
    """What an entry is called in messages: its distribution, name and object."""
    package = "a package without a name" if entry.dist is None else entry.dist.name
    return f"{package} ({entry.name} = {entry.value})"


def _loaded(entry: EntryPoint) -> Method:
    """The method of a plug-in.

    Raises:
        SpecError: it cannot be loaded, or is no `Method`.
    """
    try:
        method = entry.load()
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"the method of {_place(entry)} cannot be loaded: {type(error).__name__}: "
            f"{error}; update or uninstall that package"
        ) from error
    if not isinstance(method, Method):
        raise SpecError(
            f"{_place(entry)} is {type(method).__name__}, expected a "
            "heapr_lab.methods.method.Method; update or uninstall that package"
        )
    return method
