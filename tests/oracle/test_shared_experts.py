"""Shared experts that get zero atoms, as their width is counted in a routed one's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from keeps import check_masked, widths_keep
from stored_tensors import same_tensors, tensors_in

from heapr_lab import prune, save_pruned
from heapr_lab.checkpoints.save import KEEP_FILE, MANIFEST_FILE, prune_folder
from heapr_lab.checkpoints.uniform import stock_config, wider
from heapr_lab.models.folders import read_config
from heapr_lab.models.ragged_experts import RaggedExperts

SHAPES = Path(__file__).parents[1] / "data" / "shapes"
"""The published config.json of each model of the paper."""
DENSE, WIDTH = 24, 16
"""Atoms of a routed expert, before and after."""
COUNTED = {"deepseek_v3": "n_shared_experts", "ernie4_5_moe": "moe_num_shared_experts"}
"""Both names of the count of shared experts in widths of a routed one, by a family."""


def model_of(family: str, *, n_shared: int = 1) -> Any:
    """A tiny model with `n_shared` shared experts."""
    sizes = {"moe_intermediate_size": DENSE, COUNTED[family]: n_shared}
    return tiny_model(family, dtype=torch.float32, **sizes)


@pytest.mark.parametrize("n_shared", [1, 2])
@pytest.mark.parametrize("family", COUNTED)
def test_saved_and_sliced(family, n_shared, tmp_path):
    """24 atoms become 32 = 2 x 16, and 48 stay; in memory and of a folder."""
    model = model_of(family, n_shared=n_shared)
    keep = widths_keep(model, WIDTH, structure="uniform")
    model.save_pretrained(tmp_path / "dense")
    saved = save_pruned(prune(model, keep), tmp_path / "saved")
    sliced = prune_folder(tmp_path / "dense", keep, tmp_path / "sliced")
    same_tensors(saved, sliced)
    check_added(tmp_path / "dense", sliced, wider=n_shared == 1)
    for name in ("config.json", KEEP_FILE):
        assert (saved / name).read_bytes() == (sliced / name).read_bytes(), name
    config = json.loads((saved / "config.json").read_text())
    assert config["moe_intermediate_size"] == WIDTH
    assert config[COUNTED[family]] == {1: 2, 2: 3}[n_shared]
    loaded = check_masked(saved, model, keep)
    assert not [m for m in loaded.modules() if isinstance(m, RaggedExperts)]
    note = {1: "8 zero atoms in the shared experts of each layer", 2: None}[n_shared]
    for folder in (saved, sliced):
        manifest = json.loads((folder / MANIFEST_FILE).read_text())
        assert manifest.get("padded") == note
        card = (folder / "README.md").read_text()
        assert (f"| padded | {note} |" in card) == (note is not None)


def check_added(dense: Path, sliced: Path, *, wider: bool) -> None:
    """The first atoms are the dense model's, to the bit, and nothing else changes."""
    before, after = tensors_in(dense), tensors_in(sliced)
    shared = {name for name in before if ".shared_experts." in name}
    assert shared
    for name in [name for name in before if ".mlp.experts." not in name]:
        rows, columns = [*before[name].shape, 1][:2]
        wide = after[name] if after[name].ndim == 2 else after[name][:, None]
        kept = wide[:rows, :columns].reshape(before[name].shape)
        assert torch.equal(kept, before[name])
        wide = wide.clone()
        wide[:rows, :columns] = 0
        assert not wide.any()
        grown = after[name].shape != before[name].shape
        assert grown == (wider and name in shared)


def test_no_zero_atoms_where_the_width_divides():
    """Elsewhere there are fewer than a routed expert has.

    The example of docs/checkpoints.md is DeepSeekMoE-16B with 832 of 1,408 atoms.
    """
    config = model_of("deepseek_v3").config
    for width in range(1, DENSE + 1):
        stock = stock_config(config, width)
        assert stock.n_zero == -DENSE % width < width
        assert bool(stock.padded) == (stock.n_zero > 0)
    stock = stock_config(read_config(SHAPES / "DeepSeekMoE-16B-Base"), 832)
    assert (stock.n_zero, stock.config.n_shared_experts) == (512, 4)
    wide = {shape for name, shape in stock.padded.items() if "down_proj" in name}
    assert wide == {(2048, 2816 + 512)}


def test_only_shared_experts_may_grow():
    """By whole atoms, each in its matrices; test_wrappers.py has a family refused."""
    path = "model.layers.1.mlp.shared_experts"
    before = {f"{path}.up_proj.weight": (8, 4), f"{path}.down_proj.weight": (4, 8)}
    after = {f"{path}.up_proj.weight": (12, 4), f"{path}.down_proj.weight": (4, 12)}
    assert wider(before, after) == after
    assert wider(before, before) == {}
    assert wider(after, before) is None
    for name, shape in [("up_proj", (8, 6)), ("up_proj", (12, 6)), ("gate", (12, 4))]:
        changed = {**before, f"{path}.{name}.weight": shape}
        assert wider({**before, f"{path}.gate.weight": (8, 4)}, changed) is None
    dense = {"model.layers.0.mlp.up_proj.weight": (8, 4)}
    assert wider(dense, dict.fromkeys(dense, (12, 4))) is None
    assert wider({}, dense) is None
