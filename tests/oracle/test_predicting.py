"""Layers that predict further tokens (MTP): kept in pruned checkpoints, or left out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep, widths_keep, zeroed_twin
from stored_tensors import changed_tensors, tensors_in

from heapr_lab.checkpoints.save import prune_folder, save_pruned
from heapr_lab.models.folders import read_weights
from heapr_lab.pruning.surgery import prune
from heapr_lab.storage.files import read_json
from heapr_lab.streaming.opening import open_streamed

pytestmark = pytest.mark.oracle

COUNTS = {
    "deepseek_v3": "num_nextn_predict_layers",
    "glm4_moe": "num_nextn_predict_layers",
    "qwen3_next": "mtp_num_hidden_layers",
}
"""The key of each family, whose extra tensors are one layer more, or under `mtp.`."""

UNDER_MTP = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""Names of what the layer has besides a decoder layer, where it is under `mtp.`."""


def source_of(folder: Path, family: str) -> tuple[Any, Path, set[str]]:
    """A tiny model, a folder that has an MTP layer besides, and its tensors' names."""
    model = tiny_model(family, **{COUNTS[family]: 1})
    model.save_pretrained(folder)
    last = model.config.num_hidden_layers - 1
    old, new = f"model.layers.{last}.", f"model.layers.{last + 1}."
    if family == "qwen3_next":
        new = "mtp.layers.0."
    with changed_tensors(folder) as stored:
        names = [name for name in stored if name.startswith(old)]
        extra = {name.replace(old, new): stored[name] for name in names}
        assert any("experts.0" in name for name in extra)
        d_model, under = model.config.hidden_size, new.startswith("mtp")
        for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj"):
            shape = (d_model, 2 * d_model) if name == "eh_proj" else (d_model,)
            place = f"mtp.{UNDER_MTP[name]}" if under else new + name
            extra[f"{place}.weight"] = torch.ones(shape, dtype=torch.float64)
        stored |= extra
    return model, folder, set(extra)


@pytest.mark.parametrize("structure", ["ragged", "per_layer", "uniform"])
@pytest.mark.parametrize("family", COUNTS)
def test_in_memory_streamed_and_by_files(tmp_path, family, structure):
    """The layers are kept bit for bit, or gone; configuration and card say which.

    A stock configuration has one width for the experts of all layers.
    """
    model, source, extra = source_of(tmp_path / "source", family)
    whole = structure != "uniform"
    keep = random_keep(model)
    if structure != "ragged":
        keep = widths_keep(model, 4, structure=structure)
    cpu = torch.device("cpu")
    loaded = {
        "memory": read_weights(source, dtype=torch.float64),
        "streamed": open_streamed(source, dtype=torch.float64, device=cpu),
    }
    folders = [
        save_pruned(prune(dense, keep), tmp_path / name, base=str(source))
        for name, dense in loaded.items()
    ]
    folders.append(prune_folder(source, keep, tmp_path / "files"))
    first = tensors_in(folders[0])
    expected = logits_of(zeroed_twin(model, keep), tiny_ids())
    for folder in folders:
        tensors = tensors_in(folder)
        assert tensors.keys() == first.keys()
        assert tensors.keys() & extra == (extra if whole else set())
        assert all(torch.equal(tensors[name], first[name]) for name in first)
        before = tensors_in(source)
        assert all(torch.equal(tensors[n], before[n]) for n in extra & tensors.keys())
        assert read_json(folder / "config.json")[COUNTS[family]] == whole
        verb = "kept" if whole else "dropped"
        note = read_json(folder / "heapr_manifest.json")[verb]
        assert note.startswith(f"{len(extra)} tensors of layers")
        assert f"| {verb} | {note} |" in (folder / "README.md").read_text()
        again = read_weights(folder, dtype=torch.float64)
        again.set_experts_implementation("eager")
        logits = logits_of(again, tiny_ids())
        assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_without_experts_they_are_kept(tmp_path, structure):
    """As in MiMo: there is nothing to prune, and no width to have in common."""
    model = tiny_model("mimo_v2_flash")
    model.save_pretrained(tmp_path / "source")
    with changed_tensors(tmp_path / "source") as stored:
        first = {n: t for n, t in stored.items() if n.startswith("model.layers.0.")}
        assert not any(".experts." in name for name in first)
        extra = {
            name.replace("model.layers.0.", f"model.mtp.layers.{layer}."): tensor
            for name, tensor in first.items()
            for layer in range(3)
        }
        stored |= extra
    keep = widths_keep(model, 4, structure=structure)
    out = prune_folder(tmp_path / "source", keep, tmp_path / "out")
    after = tensors_in(out)
    assert all(torch.equal(after[name], tensor) for name, tensor in extra.items())
    assert "kept" in read_json(out / "heapr_manifest.json")


def test_quantised_ones_are_left_out(tmp_path):
    """They would be numbers without their scales' meaning beside other weights."""
    model, source, extra = source_of(tmp_path / "source", "glm4_moe")
    with changed_tensors(source) as stored:
        for name in extra:
            if name.endswith("down_proj.weight"):
                stored[name] = stored[name].to(torch.float8_e4m3fn)
    loaded = read_weights(source, dtype=torch.float64)
    keep = random_keep(model)
    out = save_pruned(prune(loaded, keep), tmp_path / "out", base=str(source))
    assert not tensors_in(out).keys() & extra
    assert "dropped" in read_json(out / "heapr_manifest.json")
    assert read_json(out / "config.json")[COUNTS["glm4_moe"]] == 0


def test_nothing_is_said_of_a_model_without(tmp_path):
    """No tensors, no words."""
    model = tiny_model("glm4_moe")
    model.save_pretrained(tmp_path / "source")
    out = prune_folder(tmp_path / "source", random_keep(model), tmp_path / "out")
    manifest = read_json(out / "heapr_manifest.json")
    assert not {"kept", "dropped"} & manifest.keys()
