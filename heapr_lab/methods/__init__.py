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

import math
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

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
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "camera-p": {"alpha": 0.9},
    "naee": {"most_subsets": 2000, "most_tokens": 4096},
    "mone": {"score": "product", "scope": "layer"},
    # Candidates at a time, rounds, and windows to judge them on; plans that survive,
    # and of a new plan, how often experts move between two layers, at most how many.
    "evoesap": {
        "population": 12,
        "generations": 4,
        "most_windows": 8,
        "survivors": 4,
        "most_moves": 1,
        "largest_move": 2,
    },
    "moe-i2-like": {
        "population": 8,
        "generations": 4,
        "most_windows": 8,
        "most_tokens": 4096,
    },
    "ream": {"group_size": 16, "batch_size": 8},
    "moe-svd-like": {"most_of_layer": 0.3},
}
"""The options of those that have any, with their defaults; known without torch."""


def check_name(name: str, known: Iterable[str] = OURS) -> None:
    """Check that there is such a method; without the registry, if no plug-in has any.

    Raises:
        SpecError: there is none.
    """
    if name not in known and (known is not OURS or not entry_points(group=GROUP)):
        raise SpecError(f"unknown method {name!r}; choose one of {', '.join(known)}")


def check_options(
    name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Check options that are given to a method, by the defaults of all it has.

    Raises:
        SpecError: there is no such option, or the value is of another type, no number,
            or a count below 1.
    """
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise SpecError(
            f"method {name!r} has no option {', '.join(unknown)}; it has "
            f"{', '.join(defaults) or 'none'}"
        )
    for option, value in options.items():
        kind = type(defaults[option])
        kinds = (int, float) if kind is float else kind
        other = not isinstance(value, kinds) or (
            kind is not bool and isinstance(value, bool)
        )
        small = kind is int and not other and value < 1
        if other or small or (kind is float and not math.isfinite(value)):
            wanted = f"{kind.__name__}{' from 1' if kind is int else ''}"
            raise SpecError(
                f"option {option} of method {name!r} is {value!r}, expected {wanted}, "
                f"such as {defaults[option]!r}"
            )


def names() -> tuple[str, ...]:
    """The names of all methods, ours and those of installed plug-ins.

    Raises:
        SpecError: a plug-in is broken, or its name is taken.
    """
    from heapr_lab.methods import registry

    return tuple(registry.all_methods())


def get(name: str) -> "Method":
    """The method with that name.

    Raises:
        SpecError: there is none, or a plug-in is broken.
    """
    from heapr_lab.methods import registry

    methods = registry.all_methods()
    check_name(name, methods)
    return methods[name]
