"""The types of numbers that models are run in, and devices, by name. Without torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from heapr_lab.errors import SpecError

NAMES = ("float32", "bfloat16", "float16", "float64")
"""Types in which everything in this package can be computed."""
DTYPES = ("auto", *NAMES)
"""The types that a model can be run in, and what chooses one."""
_DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "xla")
FP8, MXFP4, NVFP4 = DEQUANTISED = "fp8", "mxfp4", "nvfp4"
"""Formats of quantised weights that are dequantised when they are read."""


FP4_LAYOUTS: dict[str, dict[str, str]] = {
    "modelopt": {"NVFP4": NVFP4},
    "compressed-tensors": {
        "nvfp4-pack-quantized": NVFP4,
        "mxfp4-pack-quantized": MXFP4,
    },
    NVFP4: {},
}
"""Formats by the names of their layouts, by what writes them; that of transformers for
NVFP4 is not known."""


def device_name(name: str) -> str:
    """A kind of device that there is somewhere; torch knows whether it is here.

    Raises:
        SpecError: there is no such kind.
    """
    kind, _, number = name.partition(":")
    if kind not in _DEVICES or not (number or "0").isdecimal():
        raise SpecError(
            f"device is {name!r}: give one of {', '.join(_DEVICES)}, or one with a "
            "number, such as cuda:1"
        )
    return name


def format_of(settings: Mapping[str, Any]) -> str:
    """The name of the format that `quantization_config` in a config.json describes."""
    method = settings.get("quant_method", "unknown")
    method = str(getattr(method, "value", method))
    if method not in FP4_LAYOUTS:
        return method
    groups = (settings.get("config_groups") or {}).values()
    formats = {group.get("format") for group in groups}
    formats |= {settings.get("quant_algo"), settings.get("format")}
    formats |= {"with transforms"} if settings.get("transform_config") else set()
    layouts = sorted(map(str, formats - {None}))
    other = f"{method} ({', '.join(layouts)})"
    return other if len(layouts) != 1 else FP4_LAYOUTS[method].get(layouts[0], other)


def check_format(source: object, kind: str | None) -> None:
    """Check that weights in a format are dequantised when they are read.

    Args:
        source: the folder that they are in, or another name of the model.
        kind: the format; None for weights that are not quantised.

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
        block: rows and columns of a block; None for weights that have none.
        width: None for experts whose widths differ.
    """
    if not block or not width:
        return False
    return not any(width % size for size in block)


def stays_float32(model: Any, name: str) -> bool:
    """Whether the family of a model keeps the tensor `name` in float32.

    A router's corrections, for example, whatever the type of all other weights.
    """
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(part in name for part in strict)


def block_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block; None where blocks have no scale of their own."""
    block = settings.get("weight_block_size")
    if not block or settings.get("activation_scheme", "dynamic") != "dynamic":
        return None
    rows, columns = block
    return rows, columns
