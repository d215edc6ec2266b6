"""Compression methods, ours and those of other papers, behind one protocol.

For example::

    method = methods.get("reap")
    compression = method.fit(model, calibration, ratio=0.25)
    with compression.apply(model):
        evaluate_perplexity(model, ids)
    smaller = compression.materialise(model)
    compression.save(model, "smaller")

`heapr_lab.methods.method` describes what a method promises; packages can add methods
through the entry-point group `heapr_lab.methods`.
"""

from typing import TYPE_CHECKING

from heapr_lab.errors import SpecError

if TYPE_CHECKING:
    from heapr_lab.methods.method import Method


def names() -> tuple[str, ...]:
    """The names of all methods, ours and those of installed plug-ins.

    Raises:
        SpecError: a plug-in is broken, or its name is taken.
    """
    from heapr_lab.methods import registry

    return tuple(registry.found())


def get(name: str) -> "Method":
    """The method with that name.

    Raises:
        SpecError: there is none, or a plug-in is broken.
    """
    from heapr_lab.methods import registry

    methods = registry.found()
    if name not in methods:
        raise SpecError(f"unknown method {name!r}; choose one of {', '.join(methods)}")
    return methods[name]
