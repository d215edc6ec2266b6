"""Language models in multimodal wrappers: scored, pruned, saved and streamed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import WRAPPERS, tiny_ids, tiny_model
from keeps import logits_of, masked_logits, random_keep, widths_keep, zeroed_twin
from stored_tensors import changed_tensors, same_tensors, tensors_in
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from heapr_lab import prune, save_pruned
from heapr_lab.checkpoints.model_card import loading_code
from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import describe, find_experts
from heapr_lab.models.folders import build, read_config, read_weights
from heapr_lab.models.likelihood import final_states
from heapr_lab.storage.files import read_json

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
PROCESSOR = '{"processor_class": "AnyProcessor", "size": 8}'


def source_of(tmp_path: Path, kind: str, **kwargs: Any) -> tuple[Any, Path]:
    """A tiny wrapper in a folder with a processor's file, and as it is loaded."""
    model, folder = tiny_model(kind, **kwargs), tmp_path / "source"
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(PROCESSOR)
    loaded = read_weights(folder, dtype=model.dtype)
    loaded.set_experts_implementation("eager")
    return loaded.eval(), folder


NO_STOCK = ("inkling_mm_model",)
"""Wrappers whose shared experts have the width of the routed ones."""
FORMS = ("qwen3_5_moe", "qwen3_vl_moe", "gemma4", "kimi_k25", *NO_STOCK)
"""Wrappers of several forms, for what is done to the language model alone."""


@pytest.mark.parametrize("kind", WRAPPERS)
@torch.no_grad()
def test_text_runs_the_language_model_alone(kind):
    """With ids alone, states are those of the language model by itself.

    Parameters are those of the whole, FLOPs those of the language model.
    """
    model, ids = tiny_model(kind), tiny_ids()
    alone = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(final_states(model, ids), alone, rtol=1e-12, atol=1e-12)
    sizes = describe(model)
    assert sizes.n_parameters == sum(p.numel() for p in model.parameters())
    inside = sum(p.numel() for p in model.get_decoder().parameters())
    assert sizes.other_weights_per_token < inside + model.lm_head.weight.numel()


@pytest.mark.parametrize(
    ("kind", "structure"),
    [*((kind, "ragged") for kind in WRAPPERS), *((kind, "uniform") for kind in FORMS)],
)
def test_masked_is_sliced_saved_and_loaded(tmp_path, kind, structure):
    """The masked, sliced, saved and loaded model agree; all else keeps its bits.

    `prune_folder` writes what `save_pruned` writes, also of what is not streamed. A
    uniform mask gives a checkpoint that transformers loads by itself.
    """
    model, source = source_of(tmp_path, kind)
    uniform = structure == "uniform"
    ids = tiny_ids()
    keep = widths_keep(model, 4, structure=structure) if uniform else random_keep(model)
    expected = logits_of(zeroed_twin(model, keep), ids)
    assert torch.allclose(masked_logits(model, ids, keep), expected, **CLOSE)
    pruned = prune(model, keep)
    assert torch.allclose(logits_of(pruned, ids), expected, **CLOSE)
    if uniform and kind in NO_STOCK:
        with pytest.raises(SpecError, match="cannot give routed experts the width 4"):
            save_pruned(pruned, tmp_path / "out", base=str(source))
        return
    out = save_pruned(pruned, tmp_path / "out", base=str(source))
    sliced = prune_folder(source, keep, tmp_path / "sliced")
    same_tensors(sliced, out)
    loaded = AutoModelForMultimodalLM.from_pretrained(out, dtype=torch.float64)
    loaded.set_experts_implementation("eager")
    assert type(loaded).__name__ == type(model).__name__
    assert torch.allclose(logits_of(loaded, ids), expected, **CLOSE)
    if uniform:
        assert {layer.d_inter for layer in find_experts(loaded)} == {4}
        assert "quantization_config" not in read_json(out / "config.json")
    check_other_parts(source, out)
    check_words(sliced, out)


def check_other_parts(source: Path, out: Path) -> None:
    """Towers and processor are those of the source, to the bit."""
    before, after = tensors_in(source), tensors_in(out)
    rest = {name for name in before if ".experts." not in name}
    assert any(re.search("vision|visual|sam_model|vit", name) for name in rest)
    for name in rest:
        assert before[name].dtype == after[name].dtype, name
        assert torch.equal(before[name], after[name]), name
    assert (out / "preprocessor_config.json").read_text() == PROCESSOR


def check_words(*folders: Path) -> None:
    """Both say alike what was pruned."""
    for folder in folders:
        manifest = read_json(folder / "heapr_manifest.json")
        assert "language model" in manifest["pruned"]
        assert "preprocessor_config.json" in manifest["processor"]
        card = (folder / "README.md").read_text()
        assert "AutoModelForMultimodalLM" in card
        assert "the language model (" in card
    one, other = (read_json(folder / "config.json") for folder in folders)
    assert one == other


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_moe", "deepseek"])
def test_the_code_that_loads_it(tmp_path, family, structure):
    """It gives the class that was saved, and imports heapr_lab where that is needed."""
    model = tiny_model(family)
    keep = widths_keep(model, 4, structure=structure)
    named = tmp_path / 'out"); print("'  # which does not end the string
    out = save_pruned(prune(model, keep), named, tokenizer=None)
    code, names = loading_code(out), {}
    exec(code, names)
    assert type(names["model"]).__name__ == type(model).__name__
    plain = structure == "uniform" and family != "deepseek"
    assert ("import heapr_lab" in code) != plain


@pytest.mark.parametrize("width", [None, 4, 8], ids=["ragged", "uniform", "square"])
def test_experts_transposed_in_files(tmp_path, width):
    """As in the hub's layout; square ones, too, whose orientation shapes hide."""
    model, source = source_of(tmp_path, "qwen3_vl_moe", moe_intermediate_size=12)
    with changed_tensors(source) as stored:
        for name in [n for n in stored if ".experts." in n]:
            stored[name] = stored[name].mT
    keep = random_keep(model)
    if width is not None:
        keep = widths_keep(model, width, structure="uniform")
    out = prune_folder(source, keep, tmp_path / "out")
    loaded = read_weights(out, dtype=torch.float64)
    loaded.set_experts_implementation("eager")
    expected = logits_of(zeroed_twin(model, keep), tiny_ids())
    logits = logits_of(loaded, tiny_ids())
    assert torch.allclose(logits, expected, **CLOSE)


def test_the_checkpoint_says_which_class(tmp_path):
    """A type with two classes is loaded whole, unless it was saved as a text model."""
    model, source = source_of(tmp_path, "qwen3_5_moe")
    assert type(model).__name__ == "Qwen3_5MoeForConditionalGeneration"
    text = AutoModelForCausalLM.from_config(model.config)
    assert type(text).__name__ == "Qwen3_5MoeForCausalLM"
    config = read_config(source)
    config.architectures = [type(text).__name__]
    assert type(build(config)).__name__ == "Qwen3_5MoeForCausalLM"
