"""Quantised GGUF files have the type that is asked for, and llama.cpp runs them."""

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import tiny_model
from keeps import widths_keep
from tiny_folder import D_VOCAB, write_tokenizer
from torch import nn
from transformers import AutoTokenizer
from typer.testing import CliRunner

from heapr_lab.checkpoints import gguf_quantise
from heapr_lab.checkpoints.gguf import write_gguf
from heapr_lab.checkpoints.gguf_quantise import TYPES, quantise_gguf
from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.cli.app import app
from heapr_lab.errors import SpecError
from heapr_lab.pruning.surgery import prune

pytestmark = pytest.mark.oracle

N_TOKENS = 512
"""Of which the perplexity is taken, in one window."""


def pruned_model(width: int, *, d_model: int = 256) -> Any:
    """A Qwen3-MoE pruned to experts of `width`."""
    model = tiny_model(
        "qwen3_moe",
        dtype=torch.float32,
        vocab_size=D_VOCAB,
        hidden_size=d_model,
        moe_intermediate_size=2 * width,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        norm_topk_prob=True,
        initializer_range=0.02,
        max_position_embeddings=1024,
    )
    return prune(model, widths_keep(model, width, structure="uniform"))


def exported(folder: Path, model: Any) -> Path:
    """The GGUF file of `model`, in bfloat16, beside its folder."""
    save_pruned(model.bfloat16(), folder)
    write_tokenizer(folder)
    return write_gguf(folder, folder.with_suffix(".gguf"))


@pytest.mark.parametrize(
    ("kind", "width", "d_model", "why"),
    [
        ("q4_k", 32, 256, r"ffn_down_exps.* rows of 32 .*--for llama.cpp-q4_k"),
        ("q4_k", 256, 64, r"rows of 64 weights.* take q8_0 or q4_0"),
        ("q4_0", 16, 64, r"ffn_down_exps.* rows of 16 .*--for llama.cpp \("),
        ("q4_9", 32, 64, r"no type 'q4_9', expected q8_0, q4_0, q4_k"),
    ],
)
def test_rows_that_are_no_blocks_are_refused(
    kind: str, width: int, d_model: int, why: str, tmp_path: Path
) -> None:
    """llama.cpp would take another type; without the engine, and nothing is written."""
    source = exported(tmp_path / "pruned", pruned_model(width, d_model=d_model))
    with pytest.raises(SpecError, match=why):
        quantise_gguf(source, tmp_path / "small.gguf", kind)
    assert {p.name for p in tmp_path.iterdir()} == {"pruned", "pruned.gguf"}


def test_without_the_engine_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line; nothing is written before."""
    source = exported(tmp_path / "pruned", pruned_model(32)).with_suffix("")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    out = tmp_path / "new" / "x.gguf"
    asked = ["export-gguf", str(source), "--out", str(out), "--quantise", "q4_0"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2
    assert "heapr-lab[llama]" in done.output
    assert not out.parent.exists()


# --- the engine itself ------------------------------------------------------------


def text_ids(folder: Path, *, end: int) -> list[int]:
    """Tokens of a long text of the standard library."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer(inspect.getsource(argparse))["input_ids"]
    return ids[:end]


def trained(folder: Path) -> Any:
    """A pruned model that has learned something of a text: 60 steps of 1024 tokens."""
    write_tokenizer(folder)
    ids = torch.tensor(text_ids(folder, end=40_000))
    model = pruned_model(256).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    random = torch.Generator().manual_seed(0)
    for _ in range(60):
        starts = torch.randint(len(ids) - 129, (8,), generator=random)
        rows = torch.stack([ids[start : start + 129] for start in starts])
        logits = model(rows[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def perplexity(engine: Any, ids: list[int]) -> float:
    """Of tokens after the first, from the logits that llama.cpp computes."""
    engine.reset()
    engine.eval(ids)
    scores = torch.from_numpy(np.array(engine.scores[: len(ids) - 1])).double()
    loss = nn.functional.cross_entropy(scores, torch.tensor(ids[1:]))
    return float(loss.exp())


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_quantised_files_are_of_the_type_and_near(tmp_path: Path) -> None:
    """Types as asked, smaller, text goes on; perplexity beside that of bfloat16."""
    llama_cpp = pytest.importorskip("llama_cpp")
    (tmp_path / "text").mkdir()
    source = exported(tmp_path / "pruned", trained(tmp_path / "text"))
    ids = text_ids(tmp_path / "text", end=60_000)[-N_TOKENS:]  # not in the training
    found, size = {}, {"bf16": source.stat().st_size}
    for kind in ("bf16", *TYPES):
        path = source
        if kind != "bf16":
            path = quantise_gguf(source, tmp_path / f"{kind}.gguf", kind)
            check_types(path, kind)
            size[kind] = path.stat().st_size
        engine = llama_cpp.Llama(
            str(path), n_ctx=1024, logits_all=True, seed=0, verbose=False
        )
        found[kind] = perplexity(engine, ids)
        engine.reset()
        greedy = engine.generate(ids[:64], temp=0.0, repeat_penalty=1.0)
        new = [token for token, _ in zip(greedy, range(32), strict=False)]
        assert len(new) == 32
        assert max(new) < D_VOCAB
    assert found["bf16"] < 40  # of 258 tokens: it has learned
    assert size["q4_k"] < size["q8_0"] < size["bf16"]
    # Found: 14.83 in bfloat16, and 14.93, 16.36 and 15.37.
    for kind, most in (("q8_0", 0.02), ("q4_0", 0.2), ("q4_k", 0.1)):
        assert abs(found[kind] / found["bf16"] - 1) < most, found
        assert found[kind] != found["bf16"]


@pytest.mark.engine
def test_another_type_than_asked_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp takes another one where rows do not fit, if nobody looks before."""
    pytest.importorskip("llama_cpp")
    source = exported(tmp_path / "pruned", pruned_model(32))
    monkeypatch.setattr(gguf_quantise, "_check_rows", lambda *_: None)
    with pytest.raises(SpecError, match=r"ffn_down_exps.* as Q5_0, expected q4_k"):
        quantise_gguf(source, tmp_path / "small.gguf", "q4_k")
    assert {p.name for p in tmp_path.iterdir()} == {"pruned", "pruned.gguf"}


@pytest.mark.engine
def test_the_command_quantises_what_it_writes(tmp_path: Path) -> None:
    """The file alone is left, of the type; what is quantised is not quantised again."""
    pytest.importorskip("llama_cpp")
    source = exported(tmp_path / "pruned", pruned_model(32))
    out = tmp_path / "new" / "small.gguf"
    folder = str(source.with_suffix(""))
    asked = ["export-gguf", folder, "--out", str(out), "--quantise", "q4_0"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert list(out.parent.iterdir()) == [out]
    check_types(out, "q4_0")
    with pytest.raises(SpecError, match="is quantised as Q4_0, expected F32"):
        quantise_gguf(out, tmp_path / "x.gguf", "q8_0")


def check_types(path: Path, kind: str) -> None:
    """Every matrix but routers is of the type that was asked for, others float32."""
    for tensor in gguf.GGUFReader(path).tensors:
        kept = len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name
        expected = "F32" if kept else TYPES[kind].stored
        assert tensor.tensor_type.name == expected, tensor.name
