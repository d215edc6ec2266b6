"""Quantised weights: numbers in blocks with scales, and what reads them from files.

FP8 has a scale for each block. transformers derives the size from the grid of scales,
and divides rows and columns evenly among them. That is wrong wherever the last block is
smaller than the others: 24 rows in blocks of 16 have a scale for 16 rows and one for 8,
not two for 12.

FP4 has two numbers in each byte, which are dequantised when they are read. In NVFP4 16
columns of a row have a scale in FP8, and the matrix has one in float32. modelopt
multiplies by both; compressed-tensors divides by the second, and has other names. In
MXFP4 32 columns have a scale, which is a power of two; of it compressed-tensors has the
exponent. (transformers reads the MXFP4 of gpt-oss, which has a layout of its own.)
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import FineGrainedFP8Config
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import (
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from heapr_lab.errors import LayoutError
from heapr_lab.models.formats import FP4_LAYOUTS, FP8, MXFP4, format_of
from heapr_lab.models.safetensors_headers import Stored, StoredTensor, read_header

SCALES = "_scale_inv"
"""What is added to the name of a weight in that of its scales."""
BLOCK_OF_FP4 = 1, 32
"""Rows and columns of a block of four-bit numbers, of which each byte has two."""
_OUR_FP8, _OUR_FP4 = "heapr_fp8", "heapr_fp4"
"""The formats under which transformers finds the classes below."""
_BLOCK_OF_NVFP4 = 1, 16
"""Rows and columns of NVFP4 that have a scale in common; MXFP4 has `BLOCK_OF_FP4`."""
_BIAS = 127
"""What is added to the exponents of MXFP4."""
_POSITIVE = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
"""Numbers of the lower three bits; the fourth is the sign."""
_RENAMED = {
    r"\.weight_packed": ".weight",
    r"\.weight_global_scale": ".weight_scale_2",
    r"\.input_global_scale": ".input_scale",
    r"\.[kv]_scale": ".input_scale",
}
"""Names in files that are others here; those of inputs' scales are not used."""
_EIGHT_BITS = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantised(
    weight: torch.Tensor,
    block: Sequence[int],
    scales: torch.dtype = torch.float32,
    *,
    powers: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers of a weight, and the scale of each block.

    The largest number of a block is the largest of its type (e4m3): 448.

    Shapes: weight (..., rows, columns); scales (..., blocks of rows, of columns).

    Args:
        weight: in floats.
        block: rows and columns of a block, of which the last may be smaller.
        scales: their type.
        powers: whether they are powers of two, the next ones above.
    """
    wide, (rows, columns) = weight.float(), block
    missing = 0, -wide.shape[-1] % columns, 0, -wide.shape[-2] % rows
    tiles = F.pad(wide, missing).unflatten(-1, (-1, columns))
    tiles = tiles.unflatten(-3, (-1, rows))
    grid = tiles.abs().amax((-3, -1)) / _LARGEST
    grid = grid.clamp(min=torch.finfo(torch.float32).tiny)
    if powers:
        mantissa, exponent = torch.frexp(grid)
        grid = torch.ldexp(torch.ones_like(grid), exponent - (mantissa == 0.5).int())
    grid = grid.to(scales)
    numbers = wide / _of_each(grid.float(), wide.shape, block)
    return numbers.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), grid


def dequantised(
    numbers: torch.Tensor, scales: torch.Tensor, block: Sequence[int]
) -> torch.Tensor:
    """The weight of FP8 numbers and of the scale of each block, in float32.

    Shapes: as in `quantised`.
    """
    return numbers.float() * _of_each(scales.float(), numbers.shape, block)


def _of_each(
    scales: torch.Tensor, shape: torch.Size, block: Sequence[int]
) -> torch.Tensor:
    """The scale of each number, by its block."""
    rows = scales.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


# --- when files are read ----------------------------------------------------------


def with_our_classes(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of quantised weights, read by our classes if we have some."""
    method = settings.get("quant_method")
    if method in FP4_LAYOUTS:
        powers = format_of(settings) == MXFP4
        divides = method == "compressed-tensors"
        return {"quant_method": _OUR_FP4, "powers": powers, "divides": divides}
    if method == FP8:
        return settings | {"quant_method": _OUR_FP8, "dequantize": True}
    return settings


def _scales_of(name: str, dtype: str, *, powers: bool = False) -> list[list[str]]:
    """Names of its scales if a tensor is in 8 or 4 bits; files have one of each.

    Args:
        name: of the tensor.
        dtype: its type in a file.
        powers: whether bytes are MXFP4.
    """
    stem, _, leaf = name.rpartition(".")
    if leaf.endswith("_blocks"):
        return [[f"{name.removesuffix('_blocks')}_scales"]]
    if (leaf == "weight" or leaf.endswith("_proj")) and dtype.startswith("F8_E"):
        return [[f"{name}_scale_inv", f"{stem}.scale", f"{stem}.qscale_weight"]]
    if leaf == "weight" and dtype == "I8":
        return [[f"{stem}.scale", f"{name}_scale_inv"]]
    if leaf in ("weight", "weight_packed") and dtype == "U8":
        second = ("_scale_2", "_global_scale")[leaf == "weight_packed"]
        ends = ("_scale",) if powers else ("_scale", second)
        return [[f"{stem}.weight{end}"] for end in ends]
    return []


def check_scales(
    stored: Mapping[str, StoredTensor], quantizer: Any
) -> dict[str, list[StoredTensor]]:
    """Check that every tensor in 8 or 4 bits has its scales.

    Args:
        stored: tensors in files, by name.
        quantizer: what dequantises them, if anything does.

    Returns:
        The scales of each kind, by the name of the tensor.

    Raises:
        LayoutError: one has none, and would be read as if they were 1, or they are of
            other blocks or of another type.
    """
    in_fp4 = isinstance(quantizer, Fp4Quantizer)
    powers = in_fp4 and quantizer.quantization_config.powers
    scales: dict[str, list[StoredTensor]] = {}
    for name, tensor in stored.items():
        for names in _scales_of(name, tensor.dtype, powers=powers):
            there = [stored[other] for other in names if other in stored]
            if not there:
                raise LayoutError(
                    f"{tensor} has no {names[0]}: download the files again"
                )
            scales.setdefault(name, []).append(there[0])
    for name, (first, *_) in scales.items():
        _check_blocks(stored[name], first, quantizer)
        if powers and first.dtype not in ("U8", "F8_E8M0"):
            raise LayoutError(
                f"{stored[name]} has scales in {first.dtype}, expected exponents in "
                "bytes: download the files again"
            )
    return scales


def _check_blocks(tensor: StoredTensor, scales: StoredTensor, quantizer: Any) -> None:
    """Check that there is one scale for each block, of which the last may be smaller.

    Where no blocks are configured, a single number is that of the whole matrix.

    Raises:
        LayoutError: there are others.
    """
    is_ours = isinstance(quantizer, Fp8Quantizer | Fp4Quantizer)
    if tensor.dtype != "I8" and not is_ours:
        return
    weight = unpacked_shape(tensor)
    block = BLOCK_OF_FP4 if tensor.dtype == "I8" else quantizer.block
    rows, columns = block or weight[-2:]
    expected = -(-weight[-2] // rows), -(-weight[-1] // columns)
    blocks = block is not None or len(scales.shape) > 1
    if blocks and scales.shape[-2:] != expected:
        raise LayoutError(
            f"{tensor.file}: {tensor.name}: weights of {weight} have scales of "
            f"{scales.shape}, expected {expected[0]} x {expected[1]} for blocks of "
            f"{rows} x {columns} (as config.json says): download both again"
        )


def unpacked_shape(tensor: StoredTensor) -> tuple[int, ...]:
    """The shape of a weight, of which a byte may have two numbers in four bits."""
    *rows, columns = tensor.shape
    return (*rows, columns * (2 if tensor.dtype in ("U8", "I8") else 1))


class _Checking(HfQuantizer):
    """What reads weights, of whose files the headers are checked before."""

    def preprocess_model(self, model: Any, *args: Any, **options: Any) -> None:
        """Prepare the model for the weights.

        Raises:
            LayoutError: as `check_scales`.
        """
        stored: Stored = {}
        for file in options.get("checkpoint_files") or ():
            stored |= read_header(Path(file))
        check_scales(stored, self)
        super().preprocess_model(model, *args, **options)


class BlockDequantize(Fp8Dequantize):
    """transformers' operation, on weights that are padded to whole blocks."""

    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        dequantised: Callable[..., torch.Tensor] = super()._dequantize_one
        if quantized.dtype not in _EIGHT_BITS or scales.dim() < 2:
            return dequantised(quantized, scales, *args, **options)
        rows, columns = quantized.shape[-2:]
        n_rows, n_columns = self.hf_quantizer.block or (rows, columns)
        missing = 0, -columns % n_columns, 0, -rows % n_rows
        padded = F.pad(quantized.float(), missing)
        whole = dequantised(padded, scales, *args, **options)
        return whole[..., :rows, :columns].contiguous()


register_quantization_config(_OUR_FP8)(FineGrainedFP8Config)


@register_quantizer(_OUR_FP8)
class Fp8Quantizer(_Checking, FineGrainedFP8HfQuantizer):
    """transformers' quantizer, with blocks of the size that is configured."""

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that have a scale in common, if not the whole matrix."""
        size: tuple[int, int] | None = self.quantization_config.weight_block_size
        return size

    def weight_of(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """A weight in bfloat16, as it is dequantised for the model."""
        return BlockDequantize(self)._dequantize_one(numbers, scales, torch.bfloat16)

    def update_weight_conversions(self, conversions: Any, *args: Any) -> list[Any]:
        """The conversions, with transformers' operation replaced by `BlockDequantize`.

        Args:
            conversions: of the model's family.
            args: the model, in versions of transformers that give it.
        """
        converters: list[Any] = super().update_weight_conversions(conversions, *args)
        for converter in converters:
            if isinstance(converter, WeightConverter):
                converter.operations = [
                    BlockDequantize(self) if isinstance(op, Fp8Dequantize) else op
                    for op in converter.operations
                ]
        return converters


# --- FP4 --------------------------------------------------------------------------


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The numbers in bytes, of which the lower bits are the first, in float32.

    Shapes: packed (rows, columns / 2), uint8; result (rows, columns).
    """
    numbers = torch.tensor(_POSITIVE, device=packed.device)
    numbers = torch.cat([numbers, -numbers])
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1)
    return numbers[pairs.flatten(-2).long()]


@register_quantization_config(_OUR_FP4)
class Fp4Config(QuantizationConfigMixin):
    """The settings, for weights that are always dequantised."""

    def __init__(
        self, *, powers: bool = False, divides: bool = False, **_others: Any
    ) -> None:
        """Note what the scales are.

        Args:
            powers: whether they are powers of two, as in MXFP4, and all that there is.
            divides: whether weights are divided by the scale of the matrix.
        """
        self.quant_method: Any = _OUR_FP4
        self.powers, self.divides, self.dequantize = powers, divides, True


class Fp4Dequantize(ConversionOps):
    """Makes floats of weights that have scales; others stay as they are."""

    def __init__(self, hf_quantizer: "Fp4Quantizer") -> None:
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        full_layer_name: str = "",
        model: Any = None,
        **_kwargs: Any,
    ) -> dict[str, Any]:
        """The weights that transformers collected for one parameter, in its type."""
        dtype = model.get_parameter(full_layer_name).dtype
        floats = {}
        for name, stored in input_dict.items():
            if name.endswith("weight"):
                kinds = [input_dict.get(f"{name}_scale{n}") for n in ("", "_2")]
                weights = zip(stored, *filter(None, kinds), strict=True)
                floats[name] = [self._in_floats(*parts).to(dtype) for parts in weights]
        return {full_layer_name: floats["weight"][0]} if "weight" in floats else floats

    def _in_floats(self, weight: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        return self.hf_quantizer.in_floats(weight, *scales) if scales else weight


@register_quantizer(_OUR_FP4)
class Fp4Quantizer(_Checking):
    """transformers' seam, with the class above."""

    quantization_config: Fp4Config

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that have a scale in common."""
        return BLOCK_OF_FP4 if self.quantization_config.powers else _BLOCK_OF_NVFP4

    serialized_names = {  # noqa: RUF012
        "weight": ["weight", "weight_scale", "weight_scale_2", "input_scale"]
    }

    def in_floats(
        self, packed: torch.Tensor, scales: torch.Tensor, last: Any = None
    ) -> torch.Tensor:
        """The weight of numbers and of scales of both kinds, in float32."""
        settings = self.quantization_config
        if settings.powers:
            exponents = scales.view(torch.uint8).int() - _BIAS
            ones = torch.ones_like(exponents, dtype=torch.float)
            factors = torch.ldexp(ones, exponents)
        else:
            whole = 1 / last.float() if settings.divides else last.float()
            factors = scales.float() * whole
        return dequantised(unpacked(packed), factors, self.block)

    def weight_of(self, packed: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """A weight in bfloat16, as it is dequantised for the model."""
        return self.in_floats(packed, *scales).to(torch.bfloat16)

    def get_load_operations(self) -> dict[str, Any]:
        """What makes a weight of its parts."""
        return {"dequantize": Fp4Dequantize}

    def update_weight_conversions(self, conversions: Any, *args: Any) -> list[Any]:
        """The conversions, after which names are those of modelopt.

        Args:
            conversions: of the model's family.
            args: the model, in versions of transformers that give it.
        """
        renamed = [WeightRenaming(*pair) for pair in _RENAMED.items()]
        return [*renamed, *super().update_weight_conversions(conversions, *args)]

    def is_serializable(self) -> bool:
        """Whether the model can be saved: yes, in floats."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: yes."""
        return True
