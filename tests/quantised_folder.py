"""Folders of tiny models whose weights a test quantises, block by block."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from keeps import random_keep
from stored_tensors import changed_json, changed_tensors

from heapr_lab import HeaprLabError, load_model
from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.streaming.quantisation import unpacked


def in_fp8(
    folder: Path, block: tuple[int, int] = (4, 4), *, scales: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Rewrite the matrices of every layer in blocks, each with its scale.

    Args:
        folder: the folder.
        block: rows and columns of a block.
        scales: their type, if it is not float32.

    Returns:
        What the matrices are then, each weight multiplied by its block's scale.
    """
    exact = {}
    with changed_tensors(folder) as tensors:
        for name, tensor in [*tensors.items()]:
            if tensor.dim() != 2 or "_proj" not in name or "layers" not in name:
                continue
            scale = scales_of(tensor.float(), block).to(scales or torch.float32)
            every = of_each_weight(scale.float(), tensor.shape, block)
            tensors[name] = (tensor.float() / every).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            exact[name] = tensors[name].float() * every
    configure(
        folder,
        quant_method="fp8",
        weight_block_size=block,
        activation_scheme="dynamic",
    )
    return exact


def with_twin(
    folder: Path, quantise: Callable[[Path], Any], dtype: torch.dtype = torch.float32
) -> Path:
    """Quantise a folder.

    Returns:
        A copy of it beside it, whose quantised weights are floats of `dtype`.
    """
    twin = Path(shutil.copytree(folder, folder.with_name("exact")))
    exact = quantise(folder) or {}
    with changed_tensors(twin) as tensors:
        tensors |= {name: tensor.to(dtype) for name, tensor in exact.items()}
    return twin


def check_refused(folder: Path, message: str) -> None:
    """Check that no way to open the model takes it, and that nothing is written."""
    for stream in (True, False, "auto"):
        with pytest.raises(HeaprLabError, match=message):
            load_model(folder, device="cpu", stream=stream)
    keep = random_keep(tiny_model("qwen3_moe"))
    with pytest.raises(HeaprLabError, match=message):
        prune_folder(folder, keep, folder / "pruned")
    assert not (folder / "pruned").exists()


def scales_of(tensor: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The scale of each block, of which the last ones may be smaller."""
    rows = tensor.split(block[0])
    largest = [[b.abs().max() for b in row.split(block[1], 1)] for row in rows]
    return torch.tensor(largest) / 448


def of_each_weight(
    scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]
) -> torch.Tensor:
    """The scale of each weight, by its block."""
    rows = scale.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def configure(folder: Path, **settings: Any) -> None:
    """Say in config.json how the weights are quantised."""
    with changed_json(folder) as config:
        config["quantization_config"] = settings


POWERS = "compressed-tensors, powers of two"
LAYOUTS = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}},
    },
    POWERS: {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
    },
}
"""What config.json says of NVFP4, and last of MXFP4, by what writes it."""
_NUMBERS = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
).double()


def in_pairs(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    """Replace matrices of layers, whose columns are in blocks, by random ones.

    Returns:
        What they are, number by number, in float64.
    """
    generator, exact = torch.Generator().manual_seed(0), {}
    width = 32 if layout == POWERS else 16
    with changed_tensors(folder) as tensors:
        for name in [n for n in tensors if "_proj.weight" in n and "layers" in n]:
            rows, columns = tensors[name].shape
            if columns % width:
                continue
            packed = torch.randint(0, 256, (rows, columns // 2), generator=generator)
            scales = torch.rand(rows, columns // width, generator=generator) + 0.5
            last = torch.rand((), generator=generator) / 100
            if layout == POWERS:
                exponents = torch.randint(-7, 2, scales.shape, generator=generator)
                scales, last = 2.0**exponents, torch.ones(())
            scales = scales.to(torch.float8_e4m3fn)
            numbers = _NUMBERS[torch.stack([packed & 15, packed >> 4], -1)].flatten(1)
            exact[name] = of_each_weight(scales, numbers.shape, (1, width)).double()
            exact[name] *= numbers * last.double()
            del tensors[name]
            stem = name.removesuffix("weight")
            if layout == "modelopt":
                new = {"weight": packed.byte(), "weight_scale_2": last}
                new |= {"input_scale": last, "weight_scale": scales}
            elif layout == POWERS:
                new = {"weight_packed": packed.byte()}
                new |= {"weight_scale": (127 + exponents).byte()}
            else:
                new = {"weight_packed": packed.byte(), "input_global_scale": last[None]}
                new |= {"weight_global_scale": 1 / last[None], "weight_scale": scales}
            new |= {"k_scale": last} if stem.endswith("k_proj.") else {}
            tensors |= {f"{stem}{key}": tensor for key, tensor in new.items()}
    configure(folder, **LAYOUTS[layout])
    return exact


WIDE = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}
"""Sizes of models whose matrices are whole blocks of four-bit numbers."""
_IN_FP8 = re.compile(r"\.(attn\.w\w+|(e|h|main)_proj)\.weight$")


def in_fp4(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite a DeepSeek-V4 as published: experts in four bits, others in FP8.

    Returns:
        What the matrices are then: numbers times powers of two.
    """
    generator, exact = torch.Generator().manual_seed(0), {}
    with changed_tensors(folder) as tensors:
        for name, tensor in [*tensors.items()]:
            if ".experts." in name:
                packed = torch.randint(0, 256, (32, 16), generator=generator).byte()
                powers = torch.randint(-6, -1, (32, 1), generator=generator)
                exact[name] = unpacked(packed) * 2.0**powers
                tensors[name] = packed.view(torch.int8)
            elif _IN_FP8.search(name):
                powers = torch.tensor([[-8]])
                tensors[name] = (tensor.float() * 2**8).to(torch.float8_e4m3fn)
                exact[name] = tensors[name].float() / 2**8
            else:
                continue
            scales = (127 + powers).byte().view(torch.float8_e8m0fnu)
            tensors[name.replace(".weight", ".scale")] = scales
    block = {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    configure(folder, quant_method="fp8", **block)
    return exact
