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

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from heapr_lab.errors import SpecError

if TYPE_CHECKING:
    from heapr_lab.methods.method import Method

GROUP = "heapr_lab.methods"
"""The entry-point group of plug-ins; each entry is a `Method`."""
OURS = {
    **dict.fromkeys(("heapr", "heapr-l", "heapr-expert", "magnitude"), "atoms"),
    **dict.fromkeys(("random", "compress"), "atoms"),
    **dict.fromkeys(("intdim-e", "intdim-l", "intdim-g"), "atoms"),
    "camera-p": "camera",
    **dict.fromkeys(("frequency", "ean", "reap", "man", "msan"), "experts"),
    "naee": "naee",
    "mone": "mone",
    "evoesap": "evoesap",
    "moe-i2-like": "moe_i2",
    "hc-smoe": "merging",
    "mc-smoe": "mc_smoe",
    "sub-moe-like": "sub_moe",
    "ream": "ream",
    "random-groups": "merging",
    "svd": "low_rank",
    "d2-moe": "d2_moe",
    "moe-svd-like": "moe_svd",
    "moe-pruner": "moe_pruner",
}
"""The module of each method of this package, by the method's name."""


def check_name(name: str, known: Iterable[str] = OURS) -> None:
    """Check that there is such a method; without the registry, if no plug-in has any.

    Raises:
        SpecError: there is none.
    """
    if name not in known and (known is not OURS or not entry_points(group=GROUP)):
        raise SpecError(f"unknown method {name!r}; choose one of {', '.join(known)}")


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
    check_name(name, methods)
    return methods[name]
