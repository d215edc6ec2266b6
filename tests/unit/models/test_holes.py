"""A checkpoint that lacks a weight is refused by name, however it is loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from keeps import random_keep
from stored_tensors import (
    INDEX,
    changed_json,
    changed_tensors,
    configured,
    stored,
    tensors_in,
)
from tiny_folder import write_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from heapr_lab import KeepMask, load_model, prune, save_pruned
from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.folders import read_weights
from heapr_lab.streaming.opening import open_streamed

ROUTER = "model.layers.0.mlp.gate.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A dense model, one of its prunings, and the same two in several files."""
    root = tmp_path_factory.mktemp("holes")
    write_model(root / "dense")
    write_model(root / "dense_shards", max_shard_size="12KB")
    model = read_weights(root / "dense", dtype=torch.float32)
    keep = random_keep(model)
    save_pruned(prune(model, keep), root / "ragged")
    save_pruned(prune(model, keep), root / "ragged_shards", max_shard_size="12KB")
    keep.write(root / "keep.parquet")
    return {path.name: path for path in root.iterdir()}


def without(name: str) -> Callable[[Path], None]:
    """What takes the tensor `name` out of the file in a folder."""
    return stored(lambda tensors: tensors.pop(name))


def reshaped(name: str) -> Callable[[Path], None]:
    """What halves the tensor `name` in the file in a folder."""
    return stored(lambda t: t.update({name: t[name][: len(t[name]) // 2]}))


def half_of_the_index(folder: Path) -> None:
    """Keep the first half of the files that the index names."""
    with changed_json(folder / INDEX) as index:
        entries = index["weight_map"].items()
        files = sorted({file for _, file in entries})
        kept = files[: len(files) // 2]
        index["weight_map"] = {name: file for name, file in entries if file in kept}


def damaged(source: Path, into: Path, damage: Callable[[Path], None]) -> Path:
    """A copy of a folder, damaged."""
    shutil.copytree(source, into)
    damage(into)
    return into


deeper, shallower = (
    configured(num_hidden_layers=number, layer_types=None) for number in (3, 1)
)
HOLES = [
    ("", without(ROUTER), f"lacks 1 of its weights .{ROUTER}"),
    ("", without(NORM), f"lacks 1 of its weights .{NORM}"),
    ("", reshaped(ROUTER), f"has in other shapes 1 of its weights .{ROUTER}"),
    ("_shards", half_of_the_index, "lacks|num_hidden_layers 2"),
    ("", deeper, "model.layers.2|num_hidden_layers 3, but .* have 2 layers"),
    ("", shallower, r"config.json does not, \d+ of its weights .model.layers.1"),
]
NO_WIDTHS = "no widths of 'model.layers.0.mlp.experts'"
WIDTHS = [
    (lambda _: {}, NO_WIDTHS),
    (lambda _: None, NO_WIDTHS),
    (lambda _: [1], NO_WIDTHS),
    (lambda w: dict(list(w.items())[:1]), "no widths of 'model.layers.1.mlp.experts'"),
    (lambda w: {n: row[:-1] for n, row in w.items()}, "expected 4 counts of atoms"),
    (lambda w: dict.fromkeys(w, ["8"] * 4), "expected 4 counts of atoms"),
    (lambda w: dict.fromkeys(w, "abcd"), "expected 4 counts of atoms"),
    (lambda w: {n: [-1, *row[1:]] for n, row in w.items()}, "expected 4 counts"),
]


@pytest.mark.parametrize(("kind", "damage", "message"), HOLES)
def test_holes_are_neither_filled_nor_copied(kind, damage, message, folders, tmp_path):
    """The missing weight is named, by loading and by slicing, which writes nothing.

    Of a pruned checkpoint transformers alone, the checkpoint's code, and ours name it.
    """
    folder = damaged(folders[f"dense{kind}"], tmp_path / "x", damage)
    with pytest.raises(SpecError, match=message):
        load_model(folder, device="cpu")
    keep = KeepMask.read(folders["keep.parquet"])
    if damage is shallower:
        keep = KeepMask({0: keep.by_layer(0)})
    with pytest.raises((LayoutError, SpecError), match=message):
        prune_folder(folder, keep, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    folder = damaged(folders[f"ragged{kind}"], tmp_path / "pruned", damage)
    alike = f"{message}|has no experts there|no widths of"
    for options in ({}, {"trust_remote_code": True}, {"ignore_mismatched_sizes": True}):
        with pytest.raises((ValueError, RuntimeError), match=alike):
            AutoModelForCausalLM.from_pretrained(folder, **options)
    with pytest.raises(SpecError, match=alike):
        read_weights(folder)


@pytest.mark.parametrize(("new", "message"), WIDTHS)
def test_widths_are_those_of_every_expert(new, message, folders, tmp_path):
    """Widths are empty, of one layer, of another number of experts, or no numbers.

    By transformers, in memory, and streamed.
    """
    folder = Path(shutil.copytree(folders["ragged"], tmp_path / "x"))
    with changed_json(folder) as config:
        quantization = config["quantization_config"]
        quantization["widths"] = new(quantization["widths"])
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)
    for read in (
        lambda: read_weights(folder),
        lambda: open_streamed(folder, dtype=None, device=torch.device("cpu")),
    ):
        with pytest.raises(SpecError, match=message) as error:
            read()
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)


# --- what is whole ----------------------------------------------------------------


def test_a_tied_head_is_no_hole(tmp_path):
    """Embedding and head are one tensor, of which the files have either name."""
    model: Any = tiny_model("qwen3_moe", dtype=torch.float32, tie_word_embeddings=True)
    keep = random_keep(model)
    model.save_pretrained(tmp_path / "x")
    assert "lm_head.weight" not in tensors_in(tmp_path / "x")
    prune_folder(tmp_path / "x", keep, tmp_path / "out")
    for name in ("x", "out"):
        loaded = read_weights(tmp_path / name)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    configured(tie_word_embeddings=False)(tmp_path / "x")
    with pytest.raises(LayoutError, match=r"lacks 1 of its weights .lm_head\.weight"):
        prune_folder(tmp_path / "x", keep, tmp_path / "again")
    with pytest.raises(SpecError, match=r"lacks 1 of its weights .lm_head\.weight"):
        read_weights(tmp_path / "x")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    """Transformers leaves them out as well: they are no part of the model."""
    model: Any = tiny_model("glm4_moe", dtype=torch.float32)
    model.save_pretrained(tmp_path / "x")
    with changed_tensors(tmp_path / "x") as tensors:
        tensors |= {n.replace(".2.", ".3."): t for n, t in tensors.items()}
    configured(num_nextn_predict_layers=0)(tmp_path / "x")
    with pytest.raises(SpecError, match=r"config.json does not, .*model\.layers\.3"):
        read_weights(tmp_path / "x")
    configured(num_nextn_predict_layers=1)(tmp_path / "x")
    read_weights(tmp_path / "x")


def test_a_new_head_is_no_hole(folders):
    """A classifier is made of a pruned model as of any other."""
    model = AutoModelForSequenceClassification.from_pretrained(folders["ragged"])
    assert model.score.weight.shape == (2, 16)
