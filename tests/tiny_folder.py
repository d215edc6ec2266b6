"""A tiny random model in a folder, with a tokenizer and a text, as a user has them."""

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from families import tiny_model
from keeps import random_keep, widths_keep
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from heapr_lab import load_model, prune, save_pruned

D_VOCAB = 258
SIZES = {"vocab_size": D_VOCAB, "max_position_embeddings": 2048}


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """A random Qwen2-MoE and its tokenizer, written to `folder`."""
    model = tiny_model("qwen2_moe", dtype=dtype, seed=seed, **SIZES, **changes)
    return write_folder(folder, model, max_shard_size=max_shard_size)


def write_folder(folder: Path, model: Any, *, max_shard_size: str = "5GB") -> Path:
    """A model and the tokenizer of bytes, written to `folder`."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def opened(folder: Path, *, stream: bool, **options: Any) -> Any:
    """The model in `folder`, in float64 on the CPU, in memory or streamed."""
    options = {"device": "cpu", "dtype": "float64", "stream": stream} | options
    return load_model(folder, **options)[0]


def write_pruned(folder: Path, structure: str, *, family: str = "qwen3_moe") -> Path:
    """A random model of `family`, pruned to one width or to many, with a tokenizer."""
    widths = {"intermediate_size": 64, "moe_intermediate_size": 64}
    sizes = {"hidden_size": 64, "head_dim": 32} | widths
    model = tiny_model(family, dtype=torch.float32, vocab_size=D_VOCAB, **sizes)
    keep = random_keep(model)
    if structure == "uniform":
        keep = widths_keep(model, 32, structure=structure)
    save_pruned(prune(model, keep), folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes and one pair of them, written to `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {byte: 1 + i for i, byte in enumerate(alphabet)}
    vocabulary |= {"th": len(vocabulary)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        bos_token="<end>",
        model_max_length=2048,
    )
    tokenizer.save_pretrained(folder)


def write_text(path: Path, *, n_texts: int = 12) -> Path:
    """Paragraphs of 70 distinct words each, in one text file."""
    texts = [
        " ".join(f"w{number}x{word}" for word in range(70)) for number in range(n_texts)
    ]
    path.write_text("\n\n".join(texts), encoding="utf-8")
    return path


def write_piqa(folder: Path, n_items: int, *, changed: int | None = None) -> None:
    """Items of PIQA, of which one may be another."""
    columns = ["goal", "sol1", "sol2", "label"]
    rows = [(f"goal {i}", f"way {i * i}", f"{i} ways", i % 2) for i in range(n_items)]
    frame = pd.DataFrame(rows, columns=columns)
    if changed is not None:
        frame.loc[changed, "sol1"] = "something else altogether"
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        frame.to_parquet(folder / f"{split}.parquet")
