"""Compression methods, ours and those of other papers, behind one protocol.

For example::

    method = methods.get("reap")
    compression = method.fit(model, calibration, ratio=0.25)
    with compression.apply(model):
        evaluate_perplexity(model, ids)
    smaller = compression.materialise(model)

`heapr_lab.methods.method` describes what a method promises. Where atoms are removed,
`heapr_lab.save_pruned` writes `smaller`; otherwise its own `save_pretrained` does, or
refuses where no configuration of the family expresses its experts.
"""

import importlib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heapr_lab.errors import SpecError, check_names

if TYPE_CHECKING:
    from heapr_lab.methods.method import Method

_DATA = Path(__file__).with_name("methods.toml")


def _described() -> dict[str, dict[str, Any]]:
    """What `methods.toml` says of each method of this package, by its name."""
    described: dict[str, dict[str, Any]] = {}
    for name, entry in tomllib.loads(_DATA.read_text("utf-8")).items():
        like = described.get(entry.pop("like", ""), {})
        texts = [" ".join(text.split()) for text in entry.pop("deviations", ())]
        deviations = (*like.get("deviations", ()), *texts)
        described[name] = {**like, **entry, "deviations": deviations}
    return described


DESCRIBED: Mapping[str, Mapping[str, Any]] = _described()
"""The fields of each method of this package, and its `module`, by the method's name."""


def check_name(name: str) -> None:
    """Check that there is such a method.

    Raises:
        SpecError: there is none.
    """
    if name not in DESCRIBED:
        raise SpecError(f"unknown method {name!r}; choose one of {', '.join(names())}")


def check_options(
    name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Check options that are given to a method, by the defaults of all it has.

    Raises:
        SpecError: there is no such option, or the value is of another type, no number,
            or a count below 1.
    """
    check_names(options, defaults, of=f"method {name!r}", noun="option")
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
    """The names of all methods."""
    return tuple(DESCRIBED)


def get(name: str) -> "Method":
    """The method with that name.

    Raises:
        SpecError: there is none.
    """
    check_name(name)
    importlib.import_module(f"{__name__}.{DESCRIBED[name]['module']}")
    from heapr_lab.methods.method import OURS

    return OURS[name]
