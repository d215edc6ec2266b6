"""The types of numbers that models are run in, by name. Without torch."""

from typing import Any

from heapr_lab.errors import SpecError

NAMES = ("float32", "bfloat16", "float16", "float64")
"""Types in which everything in this package can be computed."""
DEQUANTISED = ("fp8", "mxfp4")
"""Formats of quantised weights that are dequantised when they are read."""


def check_dtype(name: str) -> None:
    """Make sure that models can be run in a type, or in that which `auto` chooses.

    Raises:
        SpecError: they cannot.
    """
    if name not in ("auto", *NAMES):
        raise SpecError(
            f"dtype is {name!r}, expected 'auto', 'float32', 'bfloat16', 'float16' or "
            "'float64'"
        )


def stays_float32(model: Any, name: str) -> bool:
    """Whether the family of a model keeps the tensor `name` in float32.

    A router's corrections, for example, whatever the type of all other weights.
    """
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(part in name for part in strict)
