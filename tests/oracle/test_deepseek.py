"""DeepSeekMoE against its slow twin, and in the files of the hub's layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import check_masked, logits_of, widths_keep
from methods_by_hand import SIX
from oracles import deepseek as twin
from processes import run_each
from stored_tensors import configured, same_tensors, tensors_in
from tiny_folder import write_folder
from tokenizers import Tokenizer, models, pre_tokenizers

from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.errors import SpecError
from heapr_lab.models.loading import load_model
from heapr_lab.pretrained.architectures import DeepseekForCausalLM

PUBLISHED = Path(__file__).parents[1] / "data/shapes/DeepSeekMoE-16B-Base"
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""They replace the published sizes; there are two shared experts and a dense layer."""

CODE = "raise SystemExit('the code of the checkpoint runs')"


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A tiny model as the published one is: files in bfloat16, and its own code.

    Its tensors have the names that the twin reads.
    """
    config = json.loads((PUBLISHED / "config.json").read_text()) | SIZES
    folder = tmp_path_factory.mktemp("hub") / "deepseek-moe"
    kept = ("n_shared_experts", "first_k_dense_replace", "norm_topk_prob")
    sizes = SIZES | SIX | {name: config[name] for name in kept}
    model = tiny_model("deepseek", dtype=torch.bfloat16, **sizes)
    write_folder(folder, model, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / name).write_text(CODE)
    return folder


# --- the model --------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
        {"n_shared_experts": None, "first_k_dense_replace": 0},
        {"moe_layer_freq": 2, "num_hidden_layers": 4, "num_key_value_heads": 1},
        {"num_experts_per_tok": 4, "rope_theta": 50.0},
    ],
)
def test_logits_are_those_of_the_twin(changes, tmp_path):
    """They agree to 1e-12 in float64, from the tensors that are saved."""
    model: Any = tiny_model("deepseek", **changes)
    assert isinstance(model, DeepseekForCausalLM)
    model.save_pretrained(tmp_path)
    config = model.config.to_dict()
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    ids, tensors = tiny_ids(n_sequences=2), tensors_in(tmp_path)
    for window, logits in zip(ids, logits_of(model, ids), strict=True):
        expected = twin.logits(tensors, config, window.tolist())
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_hidden_states_are_those_of_every_layer():
    """As the models of transformers give them: the embeddings and each layer's."""
    model: Any = tiny_model("deepseek")
    states = model(tiny_ids(), output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    assert torch.equal(states[0], model.model.embed_tokens(tiny_ids()))


def test_routing_in_bfloat16_is_in_float32():
    """Weights of a token add up more exactly than bfloat16 can."""
    model: Any = tiny_model("deepseek", dtype=torch.bfloat16, norm_topk_prob=True)
    rows = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        _, weights, _ = model.model.layers[1].mlp.gate(rows)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(1), torch.ones(50), rtol=0, atol=1e-6)


def test_text_with_a_cache_is_text_without():
    """Eight tokens, greedily."""
    model: Any = tiny_model("deepseek", dtype=torch.float32)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = tiny_ids(n_sequences=1)
    texts = [model.generate(ids, use_cache=cache, **options) for cache in (True, False)]
    assert texts[0].shape == (1, ids.shape[1] + 8)
    assert torch.equal(*texts)


def test_another_routing_is_refused(hub, tmp_path):
    """A sigmoid would be another model."""
    folder = Path(shutil.copytree(hub, tmp_path / "moe"))
    configured(scoring_func="sigmoid")(folder)
    with pytest.raises(SpecError, match="scoring_func is 'sigmoid'"):
        load_model(folder, device="cpu")


# --- the hub's layout -------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_published_layout_is_read(hub, *, stream):
    """It is read without its code, and equals the twin to 1e-12."""
    model, _ = load_model(hub, device="cpu", dtype="float64", stream=stream)
    assert isinstance(model, DeepseekForCausalLM)
    config = json.loads((hub / "config.json").read_text())
    ids = torch.arange(40, 52)[None]
    tensors = {name: tensor.double() for name, tensor in tensors_in(hub).items()}
    expected = twin.logits(tensors, config | {"routed_scaling_factor": 1}, ids[0])
    torch.testing.assert_close(
        logits_of(model, ids)[0], expected, rtol=1e-12, atol=1e-12
    )


def test_what_is_read_is_written_again(hub, tmp_path):
    """Tensors by the published names, to the bit, and no code is named."""
    model, _ = load_model(hub, device="cpu", dtype="bfloat16", stream=False)
    model.save_pretrained(tmp_path)
    same_tensors(hub, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" not in config
    assert config["model_type"] == "deepseek"


def test_its_tokenizer_reads_bytes(hub, tmp_path):
    """Published as a Llama tokenizer, which it is not."""
    folder = Path(shutil.copytree(hub, tmp_path / "moe"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({byte: n for n, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizerFast", "legacy": True})
    )
    _, tokenizer = load_model(folder, device="cpu")
    text = "a b\n12 é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == backend.encode(text).ids
    assert len(ids) == len(text.encode())


# --- pruned -----------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_pruned_and_reloaded(hub, tmp_path, structure):
    """Logits of the masked model; needs heapr_lab, as config.json and card say."""
    model, _ = load_model(hub, device="cpu", dtype="float32", stream=False)
    keep = widths_keep(model, 8, structure=structure)
    out = prune_folder(hub, keep, tmp_path / "out")
    check_masked(out, model, keep)
    assert tensors_in(out).keys() == tensors_in(hub).keys()
    config = json.loads((out / "config.json").read_text())
    assert "auto_map" not in config
    assert not list(out.glob("*.py"))
    if structure == "uniform":
        assert config["moe_intermediate_size"] == 8
        assert config["n_shared_experts"] == 4
    card = (out / "README.md").read_text()
    assert "transformers has no class for" in card
    assert "import heapr_lab" in card
    assert "trust_remote_code" not in card


# --- registration -----------------------------------------------------------------

LOADED = """
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
assert {{"heapr", "heapr_composed"}} <= AUTO_QUANTIZER_MAPPING.keys()
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=False)
assert type(model).__module__ == "heapr_lab.pretrained.architectures", type(model)
"""
ORDERS = (
    """
import heapr_lab
from transformers import AutoConfig
assert AutoConfig.for_model("deepseek").model_type == "deepseek"
from transformers import AutoModelForCausalLM
"""
    + LOADED,
    """
import heapr_lab
from transformers.models.llama import LlamaForCausalLM
from transformers import AutoConfig, AutoTokenizer
assert type(AutoConfig.for_model("deepseek")).__module__.startswith("heapr_lab")
""",
    """
from transformers import AutoModelForCausalLM, LlamaForCausalLM
import heapr_lab
"""
    + LOADED,
    """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
class Theirs(LlamaConfig):
    model_type = "deepseek"
AutoConfig.register("deepseek", Theirs)
import heapr_lab.pretrained.architectures
assert type(AutoConfig.for_model("deepseek")) is Theirs
assert heapr_lab.pretrained.architectures.DeepseekConfig not in (
    AutoModelForCausalLM._model_mapping
)
""",
)


def test_importing_heapr_lab_is_enough(hub):
    """Imports work in either order, and what transformers has is left alone."""
    run_each(*(code.format(folder=str(hub)) for code in ORDERS))
