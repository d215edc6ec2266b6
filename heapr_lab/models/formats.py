"""What models come in, by name: types of numbers, devices, formats, families.

Without torch. A family of transformers' with experts that is neither refused here nor
proven by a test fails `tests/unit/models/test_every_family.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from heapr_lab.errors import LayoutError, SpecError

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


# --- families -------------------------------------------------------------------

_OWN_EXPERTS = (
    "its experts do not go through transformers' experts interface, so that they can "
    "be neither measured nor masked"
)
_IN_SINGLE = (
    "parts of it compute in float32 only, so that it cannot be compared with a "
    "reference in float64"
)
REFUSED = {
    "beam": "its gating computes in float32 whatever the type of the weights, so that "
    "it cannot be compared with a reference in float64",
    "dbrx": _OWN_EXPERTS,
    "diffusion_gemma": "it is a diffusion model, and has no likelihood of the next "
    "token",
    "ernie4_5_vl_moe": "each of its layers has a second set of experts, for images, "
    "which text does not reach and whose tensors are in one list with those of the "
    "first",
    "inkling2": _IN_SINGLE,
    "inkling2_text": _IN_SINGLE,
    "inkling2_loop": _IN_SINGLE,
    "inkling2_loop_text": _IN_SINGLE,
    "llama4": _OWN_EXPERTS,
    "llama4_text": _OWN_EXPERTS,
    "mistral4": "transformers has no causal language model of it alone; inside a "
    "mistral3 checkpoint, as it is published, it is supported",
    "openai_privacy_filter": "it labels tokens, and has no head of a causal language "
    "model",
    "qwen3_omni_moe": "the class of the whole checkpoint has no forward pass, and its "
    "talker has experts of its own; a checkpoint of the thinker alone "
    "(qwen3_omni_moe_thinker) can be pruned",
    "zaya": "tokens that skip the experts are handed to expert 0 with weight 0, "
    "and would be counted as its own",
}
"""Model types, and why their experts cannot be measured, masked and sliced exactly."""


def refuse_by_name(config: Any) -> None:
    """Check that the model type of a configuration is none of those refused.

    Raises:
        LayoutError: it is; the message says why.
    """
    model_type = getattr(config, "model_type", None)
    if model_type in REFUSED:
        raise LayoutError(
            f"model_type {model_type!r} is not supported: {REFUSED[model_type]}; "
            "expected one of the families in docs/families.md"
        )
