"""Models placed by a device map of accelerate, against those without its hooks."""

from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from devices import GPU, OF_DEVICES
from families import tiny_model, tiny_windows
from keeps import masked_nll, random_keep, window_nll
from oracles.streamed import same_tables
from torch import nn

from heapr_lab.errors import LayoutError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.refinement.compensation import compensate
from heapr_lab.refinement.compress import compress

WINDOWS = tiny_windows(n_sequences=10, seq_len=16)
FAMILIES = ["qwen2_moe", "gpt_oss"]


def placed(family: str, *devices: str | int, **options: Any) -> nn.Module:
    """A tiny model whose decoder layers are on `devices` in turn."""
    model: Any = tiny_model(family)
    inner = [f"model.{name}" for name, _ in model.model.named_children()]
    outer = [name for name, _ in model.named_children()]
    split = {"model", "model.layers"}  # which are on no single device
    chosen: dict[str, Any] = dict.fromkeys({*inner, *outer} - split, "cpu")
    for number in range(len(model.model.layers)):
        chosen[f"model.layers.{number}"] = devices[number % len(devices)]
    return dispatch_model(model, chosen, main_device="cpu", force_hooks=True, **options)


def check_equal(model: nn.Module, twin: nn.Module, near: float = 1e-12) -> None:
    """Statistics, masked losses, pruned losses and perplexity are those of `twin`."""
    table, wanted = (collect_statistics(m, WINDOWS) for m in (model, twin))
    same_tables(table, wanted, near)
    keep = random_keep(twin)
    losses = []
    for each in (model, twin):
        masked = masked_nll(each, WINDOWS.ids, keep)
        sliced = window_nll(prune(each, keep), WINDOWS.ids)
        dense = evaluate_perplexity(each, WINDOWS.ids).value
        best = window_nll(compress(each, WINDOWS, ratio=0.5), WINDOWS.ids)
        losses.append([masked, sliced, torch.tensor(dense), best])
    torch.testing.assert_close(*losses, rtol=near, atol=near)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_placed_model_is_measured_and_pruned(family):
    """Its hooks move what layers are given, and change nothing else."""
    model = placed(family, "cpu")
    assert sum(hasattr(module, "_hf_hook") for module in model.modules()) > 3
    check_equal(model, tiny_model(family))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_on_two_devices(family):
    """Every other decoder layer is on the GPU."""
    model = placed(family, "cpu", 0 if GPU == "cuda" else GPU)
    assert {p.device.type for p in model.parameters()} == {"cpu", GPU}
    assert not any(p.is_meta for p in model.parameters())
    check_equal(model, tiny_model(family), OF_DEVICES)


@pytest.mark.parametrize("family", FAMILIES)
def test_offloaded_layers_are_refused(family, tmp_path):
    """The error names the layer and what to do, before anything is run."""
    model: Any = placed(family, "cpu", "disk", offload_dir=tmp_path)
    assert any(p.is_meta for p in model.model.layers[1].parameters())
    keep = random_keep(tiny_model(family))
    tried = [
        lambda: collect_statistics(model, WINDOWS),
        lambda: prune(model, keep),
        lambda: masking(model, keep).__enter__(),
        lambda: compensate(model, keep, WINDOWS),
        lambda: compress(model, WINDOWS, ratio=0.5),
    ]
    for each in tried:
        with pytest.raises(LayoutError, match=r"layers\.1.* is offloaded.*stream=True"):
            each()
