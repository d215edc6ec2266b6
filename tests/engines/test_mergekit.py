"""docs/other_tools.md: mergekit averages a pruned folder and one trained from it."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fences import fence
from stored_tensors import changed_tensors
from tiny_folder import write_pruned
from transformers import AutoModelForCausalLM

pytest.importorskip("mergekit")

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PAGE = "docs/other_tools.md"


def merged(family: str, structure: str) -> subprocess.CompletedProcess[str]:
    """What mergekit said of two folders here, and did in `merged`, as on the page."""
    write_pruned(Path("pruned"), structure, family=family)
    shutil.copytree("pruned", "tuned")
    with changed_tensors(Path("tuned")) as tensors:
        for name, tensor in tensors.items():
            tensors[name] = tensor + torch.randn_like(tensor)
    Path("merge.yml").write_text(fence(PAGE, "yaml mergekit"))
    command = shlex.split(fence(PAGE, "console mergekit"))
    assert command[:2] == ["$", "mergekit-yaml"]
    return subprocess.run(
        [sys.executable, "-m", "mergekit.scripts.run_yaml", *command[2:]],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe"])
def test_a_uniform_folder(family, tmp_path, monkeypatch):
    """Each parameter is the mean, and transformers finds all of them."""
    monkeypatch.chdir(tmp_path)
    done = merged(family, "uniform")
    assert done.returncode == 0, done.stderr
    pruned, tuned, mean = (
        AutoModelForCausalLM.from_pretrained(name).state_dict()
        for name in ("pruned", "tuned", "merged")
    )
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (pruned[name] + tuned[name]) / 2)


def test_experts_of_different_widths_are_refused(tmp_path, monkeypatch):
    """By mergekit, which stacks the experts of a layer."""
    monkeypatch.chdir(tmp_path)
    done = merged("qwen3_moe", "ragged")
    assert done.returncode != 0
    assert "stack expects each tensor to be equal size" in done.stderr
    assert not list(Path("merged").glob("*.safetensors"))
