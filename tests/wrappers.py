"""Tiny random multimodal wrappers around MoE text models, from their own configs."""

from typing import Any

import torch
from families import COMMON, TABLES, config_of, randomise, settings_of
from torch import nn
from transformers import AutoModelForMultimodalLM

WRAPPERS = settings_of(TABLES["wrappers"])
VISION = settings_of(TABLES["parts"]["vision"])
NO_STOCK = ("inkling_mm_model",)
"""Wrappers whose shared experts have the width of the routed ones."""


def tiny_wrapper(
    model_type: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **text: Any
) -> nn.Module:
    """A random wrapper with every parameter away from zero; `text` are settings."""
    settings = WRAPPERS[model_type]
    config = config_of(
        model_type,
        **settings
        | {
            "text_config": COMMON | settings.get("text_config", {}) | text,
            "vision_config": VISION | settings.get("vision_config", {}),
        },
    )
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(config, dtype=dtype)
    randomise(model)
    model.set_experts_implementation("eager")
    return model.eval()
