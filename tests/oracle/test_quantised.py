"""Quantised experts are rounded as said, saved, loaded, and run as the rounded twin."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refused, run
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep, widths_keep
from safetensors.torch import load_file
from stored_tensors import changed_tensors
from tiny_folder import write_model
from transformers import AutoModelForCausalLM

from heapr_lab.checkpoints.convert import convert, quantise_model
from heapr_lab.checkpoints.model_card import loading_code
from heapr_lab.checkpoints.save import KEEP_FILE, MANIFEST_FILE, save_pruned
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.experts import sliced_experts
from heapr_lab.models.folders import read_weights
from heapr_lab.models.ragged_experts import (
    QUANTISED,
    SCALES,
    QuantisedExperts,
    dequantised,
    quantised,
)
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement.layer_distillation import distill_layers
from heapr_lab.serving.widths import widths_by_layer
from heapr_lab.streaming.opening import open_streamed
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

IDS = tiny_ids()
LAYOUTS = ("qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss", "nemotron_h")
"""Gated and not, concatenated and interleaved, with biases, and renamed in files."""


def by_hand(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Each weight rounded to a multiple of its group's scale, one by one."""
    bits, size = {"int8": (8, weight.shape[1]), "int4": (4, 32)}[kind]
    most = {8: 127, 4: 7}[bits]
    out = torch.zeros_like(weight)
    for row, values in enumerate(weight):
        for first in range(0, len(values), size):
            group = values[first : first + size]
            scale = max(abs(float(value)) for value in group) / most
            scale = float(torch.tensor(scale).to(weight.dtype))
            for place, value in enumerate(group.tolist()):
                whole = round(value / scale) if scale else 0
                out[row, first + place] = max(-most, min(most, whole)) * scale
    return out


@pytest.mark.parametrize("kind", QUANTISED)
def test_against_rounding_one_by_one(kind: str) -> None:
    """Also a row of zeros, and no rows at all."""
    torch.manual_seed(0)
    weight = torch.randn(5, 64) * torch.tensor([1, 1e-3, 0, 30, 1])[:, None]
    whole, scale = quantised(weight, kind)
    torch.testing.assert_close(
        dequantised(whole, scale, kind), by_hand(weight, kind), rtol=1e-6, atol=0
    )
    n_bytes = whole.numel() * whole.element_size()
    assert n_bytes == weight.numel() * QUANTISED[kind][0] // 8
    none = quantised(weight[:0], kind)
    assert dequantised(*none, kind).shape == (0, 64)


def rounded(model: Any, kind: str) -> Any:
    """The twin: a pruned model whose float weights were rounded."""
    for module in sliced_experts(model).values():
        for name in SCALES:
            own = getattr(module, name)
            own.data = dequantised(*quantised(own.data, kind), kind)
    return model


def made(family: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """A pruned model with rows of 64 weights, and an expert without atoms."""
    model = tiny_model(family, dtype=dtype, hidden_size=64)
    return prune(model, random_keep(model))


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("family", LAYOUTS)
def test_saved_and_loaded(family: str, kind: str, tmp_path: Path) -> None:
    """The logits are those of the rounded weights, in any structure of files."""
    expected = logits_of(rounded(made(family), kind), IDS)
    model = made(family)
    quantise_model(model, kind)
    torch.testing.assert_close(logits_of(model, IDS), expected)
    save_pruned(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    found = sliced_experts(loaded).values()
    assert found
    assert all(isinstance(module, QuantisedExperts) for module in found)
    torch.testing.assert_close(logits_of(loaded, IDS), expected)
    loaded.save_pretrained(tmp_path / "again")
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "again"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_a_checkpoint_is_converted(structure: str, tmp_path: Path) -> None:
    """Also a stock one; and the card says of what its perplexity is."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 16}
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes)
    uniform = structure == "uniform"
    keep = widths_keep(model, 8, structure="uniform") if uniform else random_keep(model)
    pruned = prune(model, keep)
    facts = {"perplexity": {"ptb": (10.0, 11.0)}}
    save_pruned(pruned, tmp_path / "one", base="me/moe", facts=facts)
    convert(tmp_path / "one", tmp_path / "two", quantised="int4")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype="auto")
    expected = logits_of(rounded(pruned, "int4"), IDS)
    torch.testing.assert_close(logits_of(loaded, IDS), expected)
    manifest = json.loads((tmp_path / "two" / MANIFEST_FILE).read_text())
    assert "perplexity" not in manifest
    assert manifest["weights"].endswith("those of experts rounded to int4")
    card = (tmp_path / "two" / "README.md").read_text()
    assert "perplexity of the weights before they were rounded, ptb" in card
    assert "integers (int4)" in card
    assert "import heapr_lab" in card
    with pytest.raises(SpecError, match="experts with int4 cannot become int8"):
        convert(tmp_path / "two", tmp_path / "three", quantised="int8")
    assert not (tmp_path / "three").exists()
    settings = json.loads((tmp_path / "two" / "config.json").read_text())
    with pytest.raises(SpecError, match="which only transformers reads"):
        widths_by_layer(settings["quantization_config"])


def test_a_mask_of_other_weights_is_refused(tmp_path: Path) -> None:
    """It would be written beside weights that it is not of."""
    model = tiny_model("qwen3_moe", hidden_size=64)
    folder = save_pruned(prune(model, random_keep(model)), tmp_path / "one")
    random_keep(model, seed=7).write(folder / KEEP_FILE)
    with pytest.raises(CacheError, match=r"not the mask of the weights.*other widths"):
        convert(folder, tmp_path / "out", quantised="int8")
    assert not (tmp_path / "out").exists()


def test_a_mask_of_other_atoms_is_refused(tmp_path: Path) -> None:
    """Though as many are kept of every expert."""
    model = tiny_model("qwen3_moe", hidden_size=64)
    keep, other = (
        widths_keep(model, 4, structure="ragged", seed=seed) for seed in (0, 1)
    )
    folder = save_pruned(prune(model, keep), tmp_path / "one")
    other.write(folder / KEEP_FILE)
    with pytest.raises(CacheError, match=r"not the mask of the weights.*other atoms"):
        convert(folder, tmp_path / "out", quantised="int8")
    keep.write(folder / KEEP_FILE)
    convert(folder, tmp_path / "out", quantised="int8")


@pytest.mark.parametrize("said", ["{}", "[]", "7", "null", '{"structure": 1}', None])
def test_a_damaged_manifest_is_refused(said: str | None, tmp_path: Path) -> None:
    """In one line, as where there is none."""
    model = tiny_model("qwen3_moe", hidden_size=64)
    folder = save_pruned(prune(model, random_keep(model)), tmp_path / "one")
    if said is None:
        (folder / MANIFEST_FILE).unlink()
    else:
        (folder / MANIFEST_FILE).write_text(said)
    with pytest.raises(CacheError, match=f"{MANIFEST_FILE} is missing or damaged"):
        convert(folder, tmp_path / "out", quantised="int8")
    with pytest.raises(CacheError, match=f"{MANIFEST_FILE} is missing or damaged"):
        loading_code(folder)


@pytest.mark.parametrize(
    "said",
    [
        {"structure": None},
        {"base_model": [1]},
        {"perplexity": None},
        {"savings": [1]},
    ],
    ids=str,
)
def test_a_manifest_with_damaged_values_is_refused(said: Any, tmp_path: Path) -> None:
    """What is said of the mask is read from the mask; the rest is of a kind."""
    model = tiny_model("qwen3_moe", hidden_size=64)
    folder = save_pruned(prune(model, random_keep(model)), tmp_path / "one")
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    of_the_mask = {"selection": [1], "atoms": None, "atoms_kept": "x"}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | of_the_mask))
    convert(folder, tmp_path / "out", quantised="int8")
    again = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert {k: again[k] for k in of_the_mask} == {k: manifest[k] for k in of_the_mask}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | said))
    with pytest.raises(CacheError, match=f"{MANIFEST_FILE} is missing or damaged"):
        convert(folder, tmp_path / "other", quantised="int8")


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("broken", [float("inf"), -float("inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_not_rounded(kind: str, broken: float) -> None:
    """No integer is near it."""
    model = made("qwen3_moe")
    module = next(reversed(sliced_experts(model).values()))
    module.down_columns.data[3, 2] = broken
    with pytest.raises(SpecError, match=r"layers\.1\..*down_columns has weights that"):
        quantise_model(model, kind)
    assert not isinstance(module, QuantisedExperts)


def test_a_dense_model_is_not_converted(tmp_path: Path) -> None:
    """There is nothing pruned in it."""
    source = write_model(tmp_path / "dense")
    with pytest.raises(SpecError, match="is not a pruned checkpoint"):
        convert(source, tmp_path / "out", quantised="int8")


def test_the_command(tmp_path: Path) -> None:
    """`convert` says what it wrote, and with what else it would do."""
    model = tiny_model("qwen3_moe", hidden_size=64)
    folder = save_pruned(prune(model, random_keep(model)), tmp_path / "one")
    said = run("convert", folder, "--quantise", "int8", "--out", tmp_path / "two")
    assert "bytes" in said
    assert sliced_experts(read_weights(tmp_path / "two"))
    assert "--quantise" in refused("convert", folder, "--out", tmp_path / "three")


def test_files_are_smaller(tmp_path: Path) -> None:
    """As many bytes as bits and scales are said to take."""
    sizes = {}
    for kind in (None, *QUANTISED):
        model = made("qwen3_moe", dtype=torch.bfloat16)
        if kind:
            quantise_model(model, kind)
        save_pruned(model, tmp_path / str(kind))
        tensors = load_file(tmp_path / str(kind) / "model.safetensors")
        sizes[kind] = sum(
            t.nbytes for name, t in tensors.items() if ".experts." in name
        )
    assert sizes["int8"] / sizes[None] == pytest.approx((64 + 2) / 128)
    assert sizes["int4"] / sizes[None] == pytest.approx((32 + 2 * 2) / 128)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_streamed(family: str, tmp_path: Path) -> None:
    """One layer at a time, as in memory; a missing scale is named."""
    model = made(family)
    quantise_model(model, "int4")
    save_pruned(model, tmp_path / "out")
    loaded = open_streamed(
        tmp_path / "out", dtype=torch.float32, device=torch.device("cpu")
    )
    torch.testing.assert_close(logits_of(loaded, IDS), logits_of(model, IDS))
    with pytest.raises(SpecError, match="layers of this model are on disk"):
        quantise_model(loaded, "int8")
    with changed_tensors(tmp_path / "out") as tensors:
        del tensors[next(name for name in tensors if name.endswith("down_proj.scale"))]
    with pytest.raises(SpecError, match=r"down_proj\.scale"):
        read_weights(tmp_path / "out", dtype="float32")


def test_integers_are_not_trained() -> None:
    """Distillation refuses them."""
    model = tiny_model("qwen3_moe", hidden_size=64)
    pruned = prune(model, random_keep(model))
    quantise_model(pruned, "int8")
    calibration = CalibrationSet.from_ids(IDS)
    with pytest.raises(SpecError, match="are int8, expected floating-point"):
        distill_layers(pruned, model, calibration)


def test_what_cannot_be_quantised() -> None:
    """By name."""
    dense = tiny_model("qwen3_moe")
    with pytest.raises(SpecError, match="has no pruned experts"):
        quantise_model(dense, "int8")
    with pytest.raises(SpecError, match="there is no 'int3', expected int8, int4"):
        quantise_model(made("qwen3_moe"), "int3")
    narrow = tiny_model("qwen3_moe", hidden_size=16)
    with pytest.raises(SpecError, match="rows of a multiple of 32"):
        quantise_model(prune(narrow, random_keep(narrow)), "int4")
