"""A uniform checkpoint is quantised by torchao through transformers, as any stock one.

On the CPU: torchao's int4 needs a GPU. The pruned widths are no multiple of a block.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, widths_keep
from tiny_folder import write_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.models.loading import load_model
from heapr_lab.models.sources import weights_bytes
from heapr_lab.pruning.surgery import prune

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchao's own
    pytest.importorskip("torchao")
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        FqnToConfig,
        Int8WeightOnlyConfig,
    )
    from transformers import TorchAoConfig

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

IDS = tiny_ids()
EXPERTS = r"re:.*\.experts\.(gate_up_proj|down_proj)"
KINDS = {"int8": Int8WeightOnlyConfig(), "fp8": Float8WeightOnlyConfig()}
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}


def uniform(folder: Path, family: str) -> Path:
    """A stock checkpoint of a pruned model."""
    model = tiny_model(family, dtype=torch.float32, **SIZES)
    keep = widths_keep(model, 24, structure="uniform")
    return save_pruned(prune(model, keep), folder)


def loaded(folder: Path, **settings: Any) -> Any:
    """The model by transformers, whose grouped kernels do not run torchao's tensors."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", experts_implementation="eager", **settings
    )


def dequantised(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter as floats."""
    return {
        name: p.dequantize() if hasattr(p, "dequantize") and hasattr(p, "qdata") else p
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_quantised_saved_and_loaded(family, kind, tmp_path):
    """Experts and linear layers; the twin has the dequantised weights as floats."""
    folder = uniform(tmp_path / "pruned", family)
    config = FqnToConfig({EXPERTS: KINDS[kind], "_default": KINDS[kind]})
    model = loaded(folder, quantization_config=TorchAoConfig(config))
    experts = {
        name: type(p.data).__name__
        for name, p in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    assert len(experts) >= 2
    assert all(name in {"Int8Tensor", "Float8Tensor"} for name in experts.values())
    twin = loaded(folder)
    twin.load_state_dict(dequantised(model), strict=False)
    logits = logits_of(model, IDS)
    torch.testing.assert_close(logits, logits_of(twin, IDS), rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    torch.testing.assert_close(logits_of(again, IDS), logits, rtol=0, atol=0)
    assert weights_bytes(tmp_path / "saved") < 0.75 * weights_bytes(folder)
    write_tokenizer(tmp_path / "saved")
    with pytest.raises(SpecError, match="'torchao'"):
        load_model(tmp_path / "saved", device="cpu")
