"""Tiny random models of every MoE family, and wrappers, from their config classes."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
)

import heapr_lab  # noqa: F401 (transformers knows our families after it)
from heapr_lab.models.experts import find_experts
from heapr_lab.text.calibration import CalibrationSet

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def settings_of(table: dict[str, Any]) -> dict[str, Any]:
    """The settings of a table of families.toml, with those of what it uses."""
    known, settings = TABLES["parts"] | TABLES["families"], {}
    for name in table.get("uses", ()):
        settings |= settings_of(known[name])
    for name, value in table.items():
        if name == "unset":
            settings |= dict.fromkeys(value)
        elif name != "uses":
            settings[name] = settings_of(value) if isinstance(value, dict) else value
    return settings


COMMON = settings_of(TABLES["parts"]["common"])
FAMILIES = settings_of(TABLES["families"])
WRAPPERS = settings_of(TABLES["wrappers"])
"""Multimodal wrappers around a language model."""
VISION = settings_of(TABLES["parts"]["vision"])
D_VOCAB = COMMON["vocab_size"]
REPRESENTATIVES = (
    "qwen2_moe",  # shared experts
    "gpt_oss",  # biases
    "nemotron_h",  # no gate
    "aria_text",  # transposed weights
    "qwen3_next",  # two kinds of attention
    "deepseek_v3",  # latent attention, and a dense layer first
)
"""A family for each trait that code depends on; all are only in the four oracles:
`test_families`, `test_surgery`, `test_checkpoints`, `test_streaming`, and on a GPU."""
HANDING = ("deepseek_v4", "glm_moe_dsa", "hy_v4")
"""Their layers get the ids, or what the layer before attended to, beside states."""


def config_of(model_type: str, **settings: Any) -> Any:
    """A configuration; a test is skipped if the installed transformers has no such."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return AutoConfig.for_model(model_type, **settings)


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> nn.Module:
    """A random model of `family`, or wrapper, with every parameter away from zero.

    So are biases; `changes` are settings of the language model.
    """
    settings, auto = COMMON | FAMILIES.get(family, {}) | changes, AutoModelForCausalLM
    if family in WRAPPERS:
        settings, auto = wrapped(WRAPPERS[family], changes), AutoModelForMultimodalLM
    config = config_of(family, **settings)
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=dtype)
    randomise(model)
    model.set_experts_implementation("eager")  # transformers' default knows no float64
    return model.eval()


@torch.no_grad()
def model_with_sink() -> Any:
    """A tiny model of which token 0 has nearly all energy of the first layer."""
    model: Any = tiny_model("qwen2_moe")
    layer = find_experts(model)[0]
    first = model.get_input_embeddings().weight[0]
    for atom in (0, layer.d_inter):  # gate and up projection
        layer.module.gate_up_proj[:, atom] = 3 * first / first.norm()
    layer.module.down_proj[:, :, 0] *= 300
    return model


def wrapped(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings of a wrapper, with `changes` to those of its language model."""
    text = COMMON | settings.get("text_config", {}) | changes
    vision = VISION | settings.get("vision_config", {})
    return settings | {"text_config": text, "vision_config": vision}


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Give every parameter, and every table of experts, a random value."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter) * 0.3
        parameter.copy_(noise + 1 if "norm" in name or "scale" in name else noise)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token, all of them used
            table.copy_(torch.rand(D_VOCAB, 4).argsort(1)[:, : table.shape[1]])


def tiny_ids(*, n_sequences: int = 3, seq_len: int = 9, seed: int = 1) -> torch.Tensor:
    """Random token ids, LongTensor (n_sequences, seq_len)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(D_VOCAB, (n_sequences, seq_len), generator=generator)


def tiny_windows(**shape: int) -> CalibrationSet:
    """The windows of `tiny_ids`, to calibrate on."""
    return CalibrationSet.from_ids(tiny_ids(**shape))
