"""A tiny random Llama in a GGUF file, as llama.cpp writes it, and a wheel of it."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import pre_tokenizers

from heapr_lab.pretrained.wheel import Wheel

D_MODEL, D_INTER, N_LAYERS, N_HEADS, N_KV = 64, 96, 2, 4, 2
SPECIAL = ("<end>", "<start>")
MERGES = ("1 9", "t h", "9 8")
"""Merges, also of numbers, which a tokenizer that splits digits does not make."""
MEMBER = "tiny_llm/Tiny.gguf"


def write_gguf(path: Path, kind: str = "Q4_1", *, tied: bool = True) -> Path:
    """Write a Llama whose matrices are of the type `kind`, as SmolLM2's are."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in MERGES]
    writer = GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(D_MODEL)
    writer.add_block_count(N_LAYERS)
    writer.add_feed_forward_length(D_INTER)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV)
    writer.add_rope_dimension_count(D_MODEL // N_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    _add_tensors(writer, kind, len(tokens), tied=tied)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: GGUFWriter, kind: str, d_vocab: int, *, tied: bool) -> None:
    random, packing = np.random.default_rng(0), GGMLQuantizationType[kind]

    def add(name: str, *shape: int) -> None:
        values = random.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
            return
        blocks = quants.quantize(values, packing)
        writer.add_tensor(name, blocks, raw_dtype=packing)

    add("token_embd.weight", d_vocab, D_MODEL)
    add("output_norm.weight", D_MODEL)
    if not tied:
        add("output.weight", d_vocab, D_MODEL)
    d_kv = D_MODEL // N_HEADS * N_KV
    for layer in range(N_LAYERS):
        add(f"blk.{layer}.attn_norm.weight", D_MODEL)
        add(f"blk.{layer}.attn_q.weight", D_MODEL, D_MODEL)
        add(f"blk.{layer}.attn_k.weight", d_kv, D_MODEL)
        add(f"blk.{layer}.attn_v.weight", d_kv, D_MODEL)
        add(f"blk.{layer}.attn_output.weight", D_MODEL, D_MODEL)
        add(f"blk.{layer}.ffn_norm.weight", D_MODEL)
        add(f"blk.{layer}.ffn_gate.weight", D_INTER, D_MODEL)
        add(f"blk.{layer}.ffn_up.weight", D_INTER, D_MODEL)
        add(f"blk.{layer}.ffn_down.weight", D_MODEL, D_INTER)


def write_wheel(folder: Path, model: Path, *, compressed: bool = True) -> Path:
    """A wheel that holds `model`, beside a module that ends whoever imports it."""
    path = folder / "tiny_llm-0.1-py3-none-any.whl"
    about = "tiny_llm-0.1.dist-info"
    packing = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.write(model, MEMBER)
        archive.writestr("tiny_llm/__init__.py", "raise SystemExit('imported')\n")
        needs = "Requires-Dist: no-such-package-anywhere"
        archive.writestr(
            f"{about}/METADATA",
            f"Metadata-Version: 2.1\nName: tiny-llm\nVersion: 0.1\n{needs}\n",
        )
        archive.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{about}/RECORD", "")
    return path


def pinned(path: Path) -> Wheel:
    """The pin that says that `path` is the wanted wheel."""
    return Wheel(
        project="tiny-llm",
        version="0.1",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        n_bytes=path.stat().st_size,
        member=MEMBER,
        variable="HEAPR_SMOLLM2_WHEEL",
    )
