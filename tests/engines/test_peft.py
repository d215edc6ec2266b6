"""docs/other_tools.md: LoRA of PEFT trains on a pruned folder, is merged and loads."""

from typing import Any

import pytest
import torch
from fences import fence
from keeps import logits_of
from stored_tensors import tensors_in
from tiny_folder import write_pruned
from transformers import AutoModelForCausalLM

peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PAGE = "docs/other_tools.md"


@pytest.mark.parametrize("structure", ["uniform", "ragged"])
def test_trained_merged_and_loaded(structure, tmp_path, monkeypatch):
    """The page's own code: the loss falls, and files have what was trained alone."""
    write_pruned(tmp_path / "pruned", structure)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(fence(PAGE, f"python {structure}") + fence(PAGE, "python peft"), names)
    losses = names["losses"]
    assert losses[-1] < 0.9 * losses[0]

    before, after = tensors_in(tmp_path / "pruned"), tensors_in(tmp_path / "tuned")
    assert after.keys() == before.keys()
    assert {n: t.shape for n, t in after.items()} == {
        n: t.shape for n, t in before.items()
    }
    changed = {n for n, tensor in after.items() if not torch.equal(tensor, before[n])}
    routed = {n for n, tensor in after.items() if ".experts." in n and tensor.numel()}
    assert changed == routed | {n for n in after if ".self_attn." in n and "_proj" in n}

    load = AutoModelForCausalLM.from_pretrained
    adapter = peft.PeftModel.from_pretrained(load(tmp_path / "pruned"), "adapter")
    logits = logits_of(names["merged"], names["ids"])
    for model in (load(tmp_path / "tuned"), adapter):
        torch.testing.assert_close(
            logits_of(model, names["ids"]), logits, rtol=1e-4, atol=1e-4
        )
