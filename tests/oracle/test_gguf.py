"""A GGUF file has the checkpoint's numbers, and llama.cpp computes the same."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import tiny_model
from keeps import logits_of, widths_keep
from safetensors.torch import load_file, save_file
from tiny_folder import D_VOCAB, write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from heapr_lab.checkpoints.gguf import write_gguf
from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.pruning.surgery import prune

pytestmark = pytest.mark.oracle

SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"norm_topk_prob": False, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"norm_topk_prob": True},
}
WIDTH, D_INTER, D_MODEL, N_EXPERTS = 32, 64, 64, 4


def uniform(
    folder: Path, family: str, *, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Path:
    """A pruned model whose experts all have `WIDTH`, with its tokenizer."""
    common = {
        "vocab_size": D_VOCAB,
        "hidden_size": D_MODEL,
        "moe_intermediate_size": D_INTER,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
    }
    model = tiny_model(family, dtype=dtype, **(common | SIZES[family] | sizes))
    keep = widths_keep(model, WIDTH, structure="uniform")
    save_pruned(prune(model, keep), folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("family", SIZES)
def test_the_file_has_the_numbers_of_the_checkpoint(
    family: str, tmp_path: Path
) -> None:
    """Every tensor is there once, experts stacked; settings and tokenizer, too."""
    folder = uniform(tmp_path / "pruned", family)
    done: list[tuple[int, int]] = []
    path = write_gguf(
        folder, tmp_path / "pruned.gguf", progress=lambda *now: done.append(now)
    )
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    weights = load_file(folder / "model.safetensors")
    assert sum(data.size for data in found.values()) == sum(
        tensor.numel() for tensor in weights.values()
    )
    assert done[-1] == (len(found), len(found))
    for name, kind in (("gate", "gate"), ("up", "up"), ("down", "down")):
        for layer in (0, 1):
            stacked = [
                weights[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight"]
                for e in range(N_EXPERTS)
            ]
            data = found[f"blk.{layer}.ffn_{kind}_exps.weight"]
            np.testing.assert_array_equal(data, torch.stack(stacked).numpy())
    architecture = reader.fields["general.architecture"].contents()
    fields = {
        name.removeprefix(f"{architecture}."): field.contents()
        for name, field in reader.fields.items()
    }
    assert architecture == family.replace("_", "")
    assert fields["expert_feed_forward_length"] == WIDTH
    assert fields["expert_count"] == N_EXPERTS
    assert len(fields["tokenizer.ggml.tokens"]) == D_VOCAB


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    """Matrices keep their words; vectors and routers become float32."""
    folder = uniform(tmp_path / "pruned", "qwen3_moe", dtype=torch.bfloat16)
    reader = gguf.GGUFReader(write_gguf(folder, tmp_path / "pruned.gguf"))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_down_exps.weight"] == "BF16"
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert kinds["output_norm.weight"] == "F32"
    data = next(t.data for t in reader.tensors if t.name == "token_embd.weight")
    weights = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    words = np.asarray(data).view(np.int16).reshape(weights.shape)
    np.testing.assert_array_equal(words, weights.view(torch.int16).numpy())


# --- what is refused --------------------------------------------------------------


def test_what_the_engine_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    """llama.cpp never normalises the top-k weights of qwen2moe."""
    folder = uniform(tmp_path / "pruned", "qwen2_moe", norm_topk_prob=True)
    with pytest.raises(SpecError, match="would give other logits"):
        write_gguf(folder, tmp_path / "pruned.gguf")
    assert not list(tmp_path.glob("*gguf*"))


def test_ragged_widths_are_refused(tmp_path: Path) -> None:
    """GGUF has one width."""
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    keep = widths_keep(model, 4, structure="ragged")
    folder = save_pruned(prune(model, keep), tmp_path / "ragged")
    with pytest.raises(SpecError, match="--structure uniform"):
        write_gguf(folder, tmp_path / "ragged.gguf")


def test_a_family_that_is_not_written_here_is_refused(tmp_path: Path) -> None:
    """The message names the converter that may know it."""
    model = tiny_model("mixtral", dtype=torch.float32)
    model.save_pretrained(tmp_path / "mixtral")
    with pytest.raises(SpecError, match=r"mixtral: use .*convert_hf_to_gguf"):
        write_gguf(tmp_path / "mixtral", tmp_path / "mixtral.gguf")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """Nothing is written of a checkpoint that is not whole."""
    folder = uniform(tmp_path / "pruned", "qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecError, match=r"layers\.1.*up_proj.* for 3 experts"):
        write_gguf(folder, tmp_path / "pruned.gguf")
    assert not list(tmp_path.glob("*gguf*"))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """What splits text in its own way would get other tokens there."""
    folder = uniform(tmp_path / "pruned", "qwen3_moe")
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(settings))
    with pytest.raises(SpecError, match="no byte-level BPE"):
        write_gguf(folder, tmp_path / "pruned.gguf")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A file that is there stays."""
    folder = uniform(tmp_path / "pruned", "qwen3_moe")
    path = tmp_path / "pruned.gguf"
    path.write_text("mine")
    with pytest.raises(SpecError, match="exists already"):
        write_gguf(folder, path)
    assert path.read_text() == "mine"


# --- the engine itself ------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", SIZES)
def test_llama_cpp_computes_the_same(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Logits at 64 positions, greedy tokens, and the tokens of a text."""
    llama_cpp = pytest.importorskip("llama_cpp")
    folder = uniform(tmp_path / "pruned", family, dtype=dtype)
    path = write_gguf(folder, tmp_path / "pruned.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = llama_cpp.Llama(
        str(path), n_ctx=128, logits_all=True, type_k=0, type_v=0, verbose=False
    )
    text = "héapr: the def prune(model, keep):\n    return 42  # it's done"
    ids = tokenizer(text)["input_ids"]
    assert engine.tokenize(text.encode(), add_bos=False) == ids
    ids = (ids * 3)[:64]
    engine.eval(ids)
    found = torch.from_numpy(np.array(engine.scores[: len(ids)]))
    expected = logits_of(model, torch.tensor([ids]))[0]
    error = (found - expected).norm() / expected.norm()
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.95
    if dtype == torch.bfloat16:  # the engine rounds activations, as transformers does
        rounded = logits_of(model.bfloat16(), torch.tensor([ids]))[0].float()
        assert error <= 1.5 * (rounded - expected).norm() / expected.norm()
        return
    assert error < 1e-3
    new = model.generate(torch.tensor([ids[:8]]), max_new_tokens=24, do_sample=False)
    greedy = engine.generate(ids[:8], temp=0.0, repeat_penalty=1.0)
    first = [token for token, _ in zip(greedy, range(24), strict=False)]
    assert first == new[0, 8:].tolist()
