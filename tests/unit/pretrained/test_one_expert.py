"""A dense Llama opened as a MoE computes the same; what would not is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refused, run, text_of
from families import randomise
from keeps import check_same_logits, logits_of
from safetensors.torch import load_file
from stored_tensors import changed_tensors, configured, stored
from tiny_folder import D_VOCAB, write_folder, write_text
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
)

from heapr_lab.errors import HeaprLabError, LayoutError, SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.models.loading import load_model, model_folder
from heapr_lab.pretrained import one_expert

SIZES = {
    "vocab_size": D_VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.02,
}
pytestmark = pytest.mark.usefixtures("cache")


def write_dense(
    folder: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    shard: str = "1GB",
    **changes: Any,
) -> Path:
    """A tiny random dense model with a tokenizer, written to `folder`."""
    config = AutoConfig.for_model(family, **(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomise(model)
    return write_folder(folder, model, max_shard_size=shard)


def check_equal(folder: Path, *, close: float = 0.0, **options: Any) -> Any:
    """Check that the MoE's logits are the dense model's to the last bit."""
    model, _ = load_model(folder, device="cpu", as_moe=True, **options)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()
    check_same_logits(model, dense, close=close)
    assert len(find_experts(model)) == SIZES["num_hidden_layers"]
    return model


# --- exactness --------------------------------------------------------------------

LONG: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 16}


def rope(kind: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    """A Llama with rotary embeddings of a kind."""
    settings |= {"rope_type": kind, "rope_theta": 5e3}
    return "llama", {"rope_parameters": settings}


ROPES = [
    rope("default"),
    rope("linear", factor=2.0),
    rope("dynamic", factor=2.0),
    rope("yarn", **LONG),
    rope("longrope", **LONG, short_factor=[*range(1, 7)], long_factor=[*range(2, 8)]),
    rope("llama3", **LONG, low_freq_factor=1.0, high_freq_factor=4.0),
]
TIED = {"tie_word_embeddings": True}
WINDOW = {"sliding_window": 7}
OTHERS = {"head_dim": 20, "rms_norm_eps": 1e-2, "hidden_act": "swish"}
OTHERS |= rope("default")[1]
"""Wide heads, a large ε, another name of silu, another base."""
FAMILIES = [("llama", {}), ("mistral", WINDOW)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, known | new) for family, known in FAMILIES for new in ({}, TIED)),
        *((family, known | OTHERS) for family, known in FAMILIES),
        *ROPES,
    ],
)
def test_logits_are_the_same_to_the_last_bit(family, changes, tmp_path):
    """Beyond Mistral's sliding window, and the length that embeddings were made for."""
    model = check_equal(write_dense(tmp_path / "d", family, **changes))
    assert type(model).__name__ == "MixtralForCausalLM"
    assert model.config.sliding_window == changes.get("sliding_window")


def test_an_odd_width_changes_the_rounding_of_silu(tmp_path):
    """The values that do not fill a register differ; nothing else does."""
    check_equal(write_dense(tmp_path / "d", intermediate_size=84), close=1e-5)


def test_shards_and_types_are_kept(tmp_path):
    """A file at a time; a layer's FFN may lie in two of them."""
    folder = write_dense(tmp_path / "d", dtype=torch.bfloat16, shard="8KB")
    check_equal(folder, dtype="bfloat16")
    check_equal(folder)
    moe = model_folder(f"as-moe:{folder}")
    names = {path.name for path in folder.glob("*.safetensors*")}
    assert {path.name for path in moe.glob("*.safetensors*")} == names
    assert len(names) > 5
    for path in moe.glob("*.safetensors"):
        kinds = {tensor.dtype for tensor in load_file(path).values()}
        assert kinds == {torch.bfloat16}
    streamed, _ = load_model(moe, device="cpu", stream=True)
    plain, _ = load_model(moe, device="cpu")
    ids = torch.randint(D_VOCAB, (2, 9))
    assert torch.equal(logits_of(streamed, ids), logits_of(plain, ids))


def test_older_files_hold_what_is_computed_now(tmp_path):
    """The frequencies of rotary embeddings are left out."""
    folder = write_dense(tmp_path / "d")
    with changed_tensors(folder) as tensors:
        for n in (0, 1):
            name = f"model.layers.{n}.self_attn.rotary_emb.inv_freq"
            tensors[name] = torch.ones(6)
    check_equal(folder)


# --- the folder -------------------------------------------------------------------


def test_it_is_made_once_and_anew_when_the_files_change(tmp_path):
    """It has the name of the folder, a card, and the settings of generation."""
    folder = write_dense(tmp_path / "my-llama")
    name = f"as-moe:{folder}"
    moe = model_folder(name)
    assert moe.name == "my-llama"
    assert "`llama` model my-llama" in (moe / "README.md").read_text()
    assert (moe / "generation_config.json").is_file()
    first = (moe / "model.safetensors").stat().st_mtime_ns
    assert model_folder(name) == moe
    assert (moe / "model.safetensors").stat().st_mtime_ns == first
    with changed_tensors(folder) as tensors:
        for name_of in tensors:
            tensors[name_of] += 1
    assert model_folder(name) != moe
    check_equal(folder)


def test_a_sentencepiece_tokenizer_stays_what_it_is(tmp_path):
    """Read with a Mixtral it is of another class, which gives the same ids."""
    folder = write_dense(tmp_path / "d")
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁a": 3, "▁": 4, "a": 5, "b": 6}
    for file in folder.glob("tokenizer*"):
        file.unlink()
    LlamaTokenizer(vocab=vocabulary, merges=[("▁", "a")]).save_pretrained(folder)
    _, tokenizer = load_model(folder, device="cpu", as_moe=True)
    text = "a b</s> ab"
    original = AutoTokenizer.from_pretrained(folder)
    ids = original(text)["input_ids"]
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == original.decode(ids)
    assert tokenizer.all_special_tokens == original.all_special_tokens


def test_a_tokenizer_that_would_change_is_refused(tmp_path, monkeypatch):
    """Ids of a sample text are compared."""
    folder = write_dense(tmp_path / "d")
    other = Tokenizer(models.WordLevel({"<x>": 0, "?": 1}, unk_token="?"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.add_special_tokens([AddedToken("<x>", special=True)])
    strange = PreTrainedTokenizerFast(tokenizer_object=other)
    real = one_expert.read_tokenizer
    monkeypatch.setattr(
        one_expert,
        "read_tokenizer",
        lambda path: real(path) if Path(path) == folder else strange,
    )
    with pytest.raises(SpecError, match=r"the tokenizer of .* is another one"):
        model_folder(f"as-moe:{folder}")


def test_the_command_line_takes_it_too(tmp_path, cache):
    """`plan` reads the configuration alone; others make the folder."""
    folder = write_dense(tmp_path / "d")
    assert "2 experts of 192 atoms" in run("plan", f"as-moe:{folder}")
    assert not cache.exists()
    write_text(tmp_path / "text.txt")
    place = tmp_path / "table.parquet"
    run("score", f"as-moe:{folder}", "--out", place, *text_of(tmp_path))
    assert place.is_file()
    assert "another family" in refused("score", "as-moe:lab")


# --- refusals ---------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "it has attention_bias"),
    ("llama", {"mlp_bias": True}, "it has mlp_bias"),
    ("mistral", {"hidden_act": "gelu"}, "its activation is gelu"),
    ("qwen2", {}, r"\(qwen2\) .*it is of another family"),
    ("gemma2", {"head_dim": 8}, r"\(gemma2\) .*it is of another family"),
    ("mixtral", {"num_local_experts": 2}, "it is of another family"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
    ("llama", {"rope_parameters": {"rope_type": "new"}}, "rope_type is 'new'"),
]


@pytest.mark.parametrize(("family", "changes", "why"), REFUSED)
def test_what_mixtral_does_not_have_is_refused_by_name(
    family, changes, why, tmp_path, cache
):
    """The error comes before a file is written."""
    folder = write_dense(tmp_path / "d", family)
    configured(**changes)(folder)
    with pytest.raises(LayoutError, match=why) as error:
        load_model(folder, as_moe=True)
    assert "expected a dense model of the family llama or mistral" in str(error.value)
    planned = refused("plan", f"as-moe:{folder}")
    assert str(error.value) in " ".join(planned.split())
    assert not cache.exists()


BIAS, UP = (
    f"model.layers.1.mlp.{name}" for name in ("down_proj.bias", "up_proj.weight")
)


def only_pickled(path: Path) -> None:
    """Weights that would have to be unpickled."""
    path.rename(path.with_name("pytorch_model.bin"))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (
            stored(lambda t: t.update({BIAS: torch.ones(48)})),
            f"json does not, .*{BIAS}",
        ),
        (stored(lambda t: t.pop(UP)), r"up_proj"),
        (stored(lambda t: t.update({UP: t[UP][:40]})), r"up_proj"),
        (only_pickled, "has neither model.safetensors nor"),
    ],
)
def test_damaged_files_are_named(damage, why, tmp_path, cache):
    """Nothing is left in the cache."""
    folder = write_dense(tmp_path / "d")
    damage(folder / "model.safetensors")
    with pytest.raises(HeaprLabError, match=why) as error:
        load_model(folder, as_moe=True)
    assert "\n" not in str(error.value)
    assert list(cache.rglob("*.safetensors")) == []
    assert list(cache.rglob(".partial-*")) == []


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    """The error names the dense folder, not the copy in the cache.

    Transformers would make a tokenizer that knows no word, and say nothing.
    """
    folder = write_dense(tmp_path / "d")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(SpecError, match=f"there is no tokenizer in {folder}: expected"):
        load_model(folder, as_moe=True)
