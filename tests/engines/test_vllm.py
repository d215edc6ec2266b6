"""vLLM computes what transformers does, for checkpoints of every structure.

In float32 on the CPU, with tiny random models: greedy tokens and their logprobs.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_model
from keeps import logits_of, widths_keep
from processes import interpreted
from stored_tensors import changed_json, changed_tensors
from tiny_folder import D_VOCAB, write_tokenizer
from transformers import AutoModelForCausalLM

from heapr_lab.checkpoints.predicting import Further, predicting_heads
from heapr_lab.checkpoints.save import prune_folder, save_pruned
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.folders import read_weights
from heapr_lab.pruning.surgery import prune

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    vllm = pytest.importorskip("vllm")
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from heapr_lab.serving import vllm_plugin
    from heapr_lab.serving.vllm_experts import expert_of, pack, ragged_sum

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("engine"),
]

BF16 = torch.bfloat16
N_NEW, N_LONG = 12, 48
PROMPTS = [list(range(3, 3 + n)) for n in (5, 17, 1, N_LONG)]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 32,
    },
}
"""The heads that vLLM's latent attention supports, and positions with YaRN: those of
the published models."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {},
    "deepseek": {},
    "deepseek_v2": LATENT,
    # As in the published configurations; transformers knows no other router.
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "gpt_oss": {},
}


WIDTHS: dict[str, Any] = {
    "uniform": (32,),
    "per_layer": (32, 64),
    "ragged": ((0, 13, 64, 32),),
}
"""By layer in turns: one width, or that of each expert."""


def pruned(folder: Path, family: str, structure: str, **changes: Any) -> Path:
    """A pruned model of `family`."""
    model: Any = tiny_model(
        family, dtype=torch.float32, **SIZES | FAMILIES[family] | changes
    )
    keep = widths_keep(model, *WIDTHS[structure], structure=structure)
    return save_pruned(prune(model, keep), folder)


def latent(folder: Path) -> dict[str, str]:
    """Which kernel latent attention has: that for AMX takes no float32."""
    config = json.loads((folder / "config.json").read_text())
    return {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in config else {}


def engine_of(folder: Path, **settings: Any) -> Any:
    """The engine with the model in `folder`; two prompts at most run at once."""
    from vllm import LLM

    common = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 2}
    more = {"skip_tokenizer_init": True, "enforce_eager": True, **latent(folder)}
    return LLM(model=str(folder), **common | more | settings)


def generated(engine: Any) -> list[Any]:
    """The greedy continuation of every prompt."""
    from vllm import SamplingParams

    settings = SamplingParams(
        temperature=0, max_tokens=N_NEW, logprobs=1, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return list(engine.generate(prompts, settings, use_tqdm=False))


def check_as_transformers(folder: Path, outputs: list[Any]) -> None:
    """Each token is the likeliest to transformers, with the same logprob."""
    model = read_weights(folder, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == N_NEW
        logits = logits_of(model, torch.tensor([prompt + tokens]))[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(-1).tolist()
        logprobs = [
            top[token].logprob
            for token, top in zip(tokens, output.outputs[0].logprobs, strict=True)
        ]
        torch.testing.assert_close(
            torch.tensor(logprobs), expected.max(-1).values, rtol=0, atol=2e-4
        )


@pytest.mark.parametrize("structure", ["per_layer", "ragged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs(family, structure, tmp_path):
    """Prompts of different lengths, some of which wait for others to end."""
    folder = pruned(tmp_path / "pruned", family, structure)
    check_as_transformers(folder, generated(engine_of(folder)))


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
)
def test_uniform_is_a_stock_checkpoint(family, tmp_path):
    """It loads in vLLM by itself; 48 atoms of DeepSeek's shared experts become 64."""
    wide = {"moe_intermediate_size": 48} if "deepseek" in family else {}
    folder = pruned(tmp_path / "pruned", family, "uniform", **wide)
    manifest = json.loads((folder / "heapr_manifest.json").read_text())
    assert ("padded" in manifest) == bool(wide)
    assert "quantization_config" not in (folder / "config.json").read_text()
    check_as_transformers(folder, generated(engine_of(folder)))


def with_mtp(folder: Path, family: str) -> Path:
    """A model of one layer without attention, and an MTP layer that is a copy of it.

    It sees the next token's embedding alone, so it predicts what the model will.
    """
    sizes = SIZES | FAMILIES.get(family, {}) | {"num_nextn_predict_layers": 1}
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    tiny_model(family, dtype=torch.float32, **sizes | one).save_pretrained(folder)
    with changed_tensors(folder) as stored:
        embeddings = stored["model.embed_tokens.weight"]
        embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
        stored["model.layers.0.self_attn.o_proj.weight"].zero_()
        stored |= {n.replace("layers.0", "layers.1"): t for n, t in stored.items()}
        norm = stored["model.norm.weight"]
        parts = dict.fromkeys(("hnorm", "shared_head.norm"), norm)
        parts["enorm"] = torch.ones_like(norm)
        parts["eh_proj"] = torch.eye(len(norm), 2 * len(norm))
        stored |= {f"model.layers.1.{name}.weight": t for name, t in parts.items()}
    return folder


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_drafts_with_a_pruned_layer(family, tmp_path, monkeypatch):
    """Every draft is right but one: vLLM leaves out the embedding at position 0.

    The atoms are given, because vLLM's transformers is too old to score the layer.
    """
    source = with_mtp(tmp_path / "source", family)
    keep = widths_keep(read_weights(source), *WIDTHS["uniform"], structure="uniform")

    def same_atoms(_: Any, skeleton: Any, base: str, *__: Any, **___: Any) -> Further:
        kept = {1: torch.tensor(keep.by_layer(0))}
        return Further(predicting_heads(skeleton, base), {}, kept)

    monkeypatch.setattr("heapr_lab.checkpoints.save.further_layers", same_atoms)
    folder = prune_folder(source, keep, tmp_path / "pruned")
    drafting = {"method": "mtp", "num_speculative_tokens": 1, **latent(folder)}
    engine = engine_of(folder, speculative_config=drafting, disable_log_stats=False)
    check_as_transformers(folder, generated(engine))
    counts = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
    n_right = counts["vllm:spec_decode_num_accepted_tokens"]
    assert n_right == counts["vllm:spec_decode_num_draft_tokens"] - 1 > N_NEW


@pytest.mark.parametrize("structure", ["per_layer", "ragged"])
def test_each_layer_has_its_own_width(structure, tmp_path):
    """No more is allocated than is kept, on the kernels that are said to run."""
    folder = pruned(tmp_path / "pruned", "qwen3_moe", structure)
    shapes = engine_of(folder).apply_model(_shapes_of_experts)[0]
    if structure == "ragged":
        assert shapes == [("RaggedMethod", 128 * 64)] * 2
    else:
        assert shapes == [("NarrowMethod", 4 * 32 * 64), ("NarrowMethod", 4 * 64 * 64)]


def _shapes_of_experts(model: Any) -> list[tuple[str, int]]:
    """The method of each layer's experts, and the elements of its W_down."""
    experts = [m for m in model.modules() if hasattr(m, "w2_weight")]
    return [(type(m.quant_method).__name__, m.w2_weight.numel()) for m in experts]


@pytest.mark.parametrize("structure", ["per_layer", "ragged"])
def test_prefix_cache(structure, tmp_path):
    """A prompt that was seen is not computed again, and goes on as before."""
    folder = pruned(tmp_path / "pruned", "qwen3_moe", structure)
    engine = engine_of(folder, enable_prefix_caching=True, block_size=32)
    first, second = generated(engine), generated(engine)
    assert first[-1].num_cached_tokens == 0
    assert second[-1].num_cached_tokens >= 32
    check_as_transformers(folder, second)


@pytest.mark.parametrize(
    "settings",
    [{"tensor_parallel_size": 2}, {"enforce_eager": False}],
    ids=["two ranks", "compiled"],
)
@pytest.mark.parametrize("form", ["per_layer", "ragged", "gpt_oss"])
def test_other_ways_to_run(form, settings, tmp_path):
    """Each of two ranks has a part of every expert's atoms, of 13 one has 6.

    An output bias, as in gpt-oss, is added on one of them.
    """
    family = form if form in FAMILIES else "qwen2_moe"
    structure = form if form == "per_layer" else "ragged"
    folder = pruned(tmp_path / "pruned", family, structure)
    engine = engine_of(folder, **settings)
    outputs = generated(engine)
    engine.llm_engine.engine_core.shutdown()
    check_as_transformers(folder, outputs)


SERVERS = {
    "command": [str(Path(sys.executable).with_name("vllm")), "serve"],
    "module": [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"],
}


@pytest.mark.parametrize("kind", SERVERS)
def test_served(kind, tmp_path):
    """The server answers as the model does, from processes of its own.

    `vllm serve` asks for the version of a package named vllm, which the CPU build is
    not; the server itself is the same.
    """
    folder = pruned(tmp_path / "pruned", "qwen3_moe", "ragged", vocab_size=D_VOCAB)
    write_tokenizer(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*SERVERS[kind], str(folder), "--port", str(port)]
    command += ["--max-model-len", "96", "--dtype", "float32", "--enforce-eager"]
    paths = [os.environ.get("PYTHONPATH", "")]
    if kind == "command":
        paths.insert(0, str(_package_named_vllm(tmp_path)))
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
    try:
        answer = _asked(server, f"http://127.0.0.1:{port}/v1/completions", folder)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    expected = model.generate(
        torch.tensor([PROMPTS[1]]), max_new_tokens=N_NEW, do_sample=False
    )
    assert answer["choices"][0]["token_ids"] == expected[0, len(PROMPTS[1]) :].tolist()


def _package_named_vllm(folder: Path) -> Path:
    """A folder for PYTHONPATH that gives this build's version under that name."""
    version = f"{vllm.__version__}+cpu"
    facts = folder / "names" / f"vllm-{version}.dist-info"
    facts.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (facts / "METADATA").write_text(text, "utf-8")
    return facts.parent


def _asked(server: subprocess.Popen[bytes], url: str, folder: Path) -> Any:
    """The answer, once the server listens."""
    settings = {"temperature": 0, "max_tokens": N_NEW, "return_token_ids": True}
    body = {"model": str(folder), "prompt": PROMPTS[1], "ignore_eos": True} | settings
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    for _ in range(300):
        assert server.poll() is None, (folder.parent / "log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            time.sleep(1)
    raise AssertionError((folder.parent / "log").read_text()[-2000:])


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize(
    ("isa", "dtype", "tolerance"),
    [("", torch.float64, 1e-12), ("vec", torch.float32, 1e-5), ("vec", BF16, 2e-2)],
    ids=["torch", "kernel", "kernel, bfloat16"],
)
def test_the_sum_against_loops(isa, dtype, tolerance, activation):
    """Token by token, slot by slot and atom by atom, in float64.

    That of gpt-oss with biases, whose gates are clamped here.
    """
    torch.manual_seed(0)
    biased = activation == "swigluoai"
    widths, d_model = ([0, 32, 64, 96], 64) if isa else ([0, 3, 1, 5], 6)
    shapes: Any = [(2 * sum(widths), d_model), (sum(widths), d_model)]
    shapes += [(2 * sum(widths),), (len(widths), d_model)] if biased else []
    tensors: list[Any] = [torch.randn(shape).to(dtype) for shape in shapes]
    tensors += [None] * (4 - len(tensors))
    x = torch.randn(7, d_model).to(dtype)
    weights, ids = torch.rand(7, 2), torch.rand(7, 4).argsort(1)[:, :2]
    expected = torch.zeros_like(x, dtype=torch.float64)
    w13, w2, b13, b2 = (None if t is None else t.double() for t in tensors)
    for token, slot in np.ndindex(7, 2):
        number = int(ids[token, slot])
        out = b2[number].clone() if biased else torch.zeros(d_model).double()
        first, width = sum(widths[:number]), widths[number]
        for atom in range(width):
            rows = 2 * first + atom, 2 * first + width + atom
            gate, up = (w13[row] @ x[token].double() for row in rows)
            if biased:
                gate = min(gate + b13[rows[0]], torch.tensor(7.0))
                up = (up + b13[rows[1]]).clamp(-7, 7) + 1
            h = gate * torch.sigmoid((1.702 if biased else 1) * gate) * up
            out += h * w2[first + atom]
        expected[token] += weights[token, slot] * out
    starts = [0, *np.cumsum(widths).tolist()]
    if isa:
        experts = [expert_of(tuple(tensors), starts, n) for n in range(len(widths))]
        pack(experts, isa, by_turns=biased)
    output = ragged_sum(x, *tensors, starts, ids.int(), weights, activation, isa)
    assert output.dtype == dtype
    error = (output.double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance


def test_the_sum_by_the_kernel_for_gpus():
    """The same, by Triton's interpreter in a process of its own."""
    code = (
        "import torch\n"
        "from heapr_lab.serving import vllm_experts\n"
        "from test_vllm import test_the_sum_against_loops as check\n"
        "vllm_experts.kernel_runs = lambda *_: True\n"
        "for activation in ('silu', 'swigluoai'):\n"
        "    check('', torch.float16, 5e-3, activation)"
    )
    interpreted(code, __file__)


def test_weights_that_are_loaded_again(tmp_path):
    """They are arranged for the kernel again, with zeros where experts are padded."""
    folder = pruned(tmp_path / "pruned", "qwen3_moe", "ragged")
    engine = engine_of(folder)
    engine.collective_rpc("reload_weights")
    check_as_transformers(folder, generated(engine))


def test_widths_that_no_kernel_takes(tmp_path):
    """Torch computes where the model is not as wide as vLLM's kernel needs."""
    folder = pruned(tmp_path / "pruned", "qwen3_moe", "ragged", hidden_size=48)
    engine = engine_of(folder)
    assert engine.apply_model(_shapes_of_experts)[0] == [("RaggedMethod", 109 * 48)] * 2
    check_as_transformers(folder, generated(engine))


@pytest.mark.parametrize(
    ("unusual", "message"),
    [
        ({"moe_parallel_config": SimpleNamespace(use_ep=True)}, "expert parallelism"),
        ({"swiglu_limit": 7.0}, "clamped"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"activation": MoEActivation.SWIGLUSTEP}, "activation swiglustep"),
        ({}, "CUDA graphs.*enforce-eager"),
    ],
    ids=str,
)
def test_what_is_refused(unusual, message, monkeypatch):
    """By name, before weights are allocated; the last one on a GPU."""
    usual = {
        "num_logical_experts": 2,
        "tp_size": 1,
        "moe_parallel_config": SimpleNamespace(use_ep=False),
        "has_bias": False,
        "swiglu_limit": None,
        "is_lora_enabled": False,
        "activation": MoEActivation.SILU,
    }
    graphs = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))
    monkeypatch.setattr(vllm_plugin, "get_current_vllm_config", lambda: graphs)
    gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(vllm_plugin, "current_platform", gpu)
    moe: Any = SimpleNamespace(**usual | unusual)
    method = vllm_plugin.HeaprWidths({0: [1, 2]})
    with pytest.raises(SpecError, match=message):
        method._of_experts(moe, "model.layers.0.mlp.experts")


@pytest.mark.parametrize(
    ("family", "kind", "part"),
    [("qwen3_moe", "weight", "w3"), ("gpt_oss", "bias", "w3_bias")],
)
def test_a_tensor_that_is_missing(family, kind, part, tmp_path):
    """It is not left as memory was."""
    folder = pruned(tmp_path / "pruned", family, "ragged")
    with changed_tensors(folder) as tensors:
        del tensors[f"model.layers.1.mlp.experts.2.up_proj.{kind}"]
    message = rf"1 tensors .*layers.1.* {part} of expert 2"
    with pytest.raises(LayoutError, match=message):
        engine_of(folder)


def test_another_activation_of_gpt_oss(tmp_path):
    """The two numbers are fixed in vLLM; transformers reads them in config.json."""
    folder = pruned(tmp_path / "pruned", "gpt_oss", "ragged", swiglu_limit=5.0)
    with pytest.raises(SpecError, match=r"swiglu_limit and swiglu_alpha \(5.0, 1.7"):
        engine_of(folder)


@pytest.mark.parametrize("structure", ["per_layer", "ragged"])
def test_widths_of_another_checkpoint(structure, tmp_path):
    """A narrower tensor does not fill a part of a wider one."""
    folder = pruned(tmp_path / "pruned", "qwen3_moe", structure)
    with changed_json(folder) as config:
        widths = config["quantization_config"]["widths"]
        widths["model.layers.1.mlp.experts"] = [96] * 4
    with pytest.raises(LayoutError, match="belongs to another checkpoint"):
        engine_of(folder)
