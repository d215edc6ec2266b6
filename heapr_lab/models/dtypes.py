"""The types of numbers that models are run in, by name. Without torch."""

from collections.abc import Mapping, Sequence
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


def format_of(settings: Mapping[str, Any]) -> str:
    """The name of the format that `quantization_config` in a config.json describes."""
    method = settings.get("quant_method", "unknown")
    return str(getattr(method, "value", method))


def check_format(source: object, kind: str | None) -> None:
    """Check that weights in a format are dequantised when they are read.

    Args:
        source: the folder that they are in, or another name of the model.
        kind: the format; None of weights that are not quantised.

    Raises:
        SpecError: they are not.
    """
    if kind not in (None, *DEQUANTISED):
        raise SpecError(
            f"{source} has weights in the format {kind!r}, expected none, "
            f"{' or '.join(DEQUANTISED)}: take the checkpoint that is not quantised, "
            "prune it, and quantise the result"
        )


def blocks_fit(block: Sequence[int] | None, width: int | None) -> bool:
    """Whether experts that all have `width` atoms are whole blocks of FP8 weights.

    Args:
        block: rows and columns of a block; None of weights that have none.
        width: None of experts whose widths differ.
    """
    if not block or not width:
        return False
    return not any(width % own for own in block)


def stays_float32(model: Any, name: str) -> bool:
    """Whether the family of a model keeps the tensor `name` in float32.

    A router's corrections, for example, whatever the type of all other weights.
    """
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(part in name for part in strict)
