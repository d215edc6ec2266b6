"""docs/other_tools.md: llm-compressor quantises a uniform folder, as any stock one."""

import warnings
from pathlib import Path

import pytest
import torch
from fences import fence
from stored_tensors import tensors_in
from tiny_folder import write_pruned
from transformers import AutoModelForCausalLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # llm-compressor's own
    pytest.importorskip("llmcompressor")

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

CODE = fence("docs/other_tools.md", "python llmcompressor")


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_quantised_and_loaded(family, tmp_path, monkeypatch):
    """Routed experts too, each weight to its nearest in FP8; nothing is missing."""
    monkeypatch.chdir(tmp_path)
    write_pruned(Path("pruned"), "uniform", family=family)
    exec(CODE, {})
    floats, stored = (tensors_in(Path(name)) for name in ("pruned", "pruned-fp8"))
    names = {n for n in floats if "proj.weight" in n}
    assert {n for n, w in stored.items() if w.dtype == torch.float8_e4m3fn} == names
    for name in names:
        scale = stored.pop(f"{name}_scale")
        stored[name] = stored[name].float() * scale
        half_a_step = floats[name].abs() / 16 + scale * 2**-10
        assert ((stored[name] - floats[name]).abs() <= 1.01 * half_a_step).all()
    assert stored.keys() == floats.keys()
    assert all(torch.equal(stored[n], floats[n]) for n in floats.keys() - names)

    model = AutoModelForCausalLM.from_pretrained("pruned-fp8", dtype="float32")
    experts = model.model.layers[1].mlp.experts.down_proj
    for expert, weight in enumerate(experts):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        torch.testing.assert_close(weight.float(), stored[name], rtol=2**-8, atol=0)


def test_experts_of_different_widths_are_refused(tmp_path, monkeypatch):
    """By llm-compressor, and by name."""
    monkeypatch.chdir(tmp_path)
    write_pruned(Path("pruned"), "ragged")
    with pytest.raises(ValueError, match=r"different format \(heapr\)"):
        exec(CODE, {})
