"""Widths are those that an engine loads, wherever they are said."""

import json
from pathlib import Path

import pytest
from commands import TINY, refused, run
from families import tiny_model
from tiny_folder import write_model, write_text

from heapr_lab.checkpoints.engines import ENGINES, check_computed, widths_for
from heapr_lab.cli import options
from heapr_lab.errors import SpecError
from heapr_lab.pruning.options import STRUCTURES


def test_the_documentation_says_the_same():
    """A row for each engine, and the help of `--for` names them all."""
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    for name, engine in ENGINES.items():
        row = f"| `{name}` | {engine.structure} | {engine.multiple} | {engine.why} |"
        assert row in text
        assert name in options.Engine.__metadata__[0].help
        assert engine.structure in STRUCTURES


def test_what_is_given_is_kept_where_the_engine_takes_it():
    """A multiple of the engine's is kept, and so is the engine's structure."""
    assert widths_for(None, None, None) == ("ragged", None)
    assert widths_for(None, "aligned", 8) == ("aligned", 8)
    assert widths_for("vllm", None, None) == ("uniform", 64)
    assert widths_for("vllm", "uniform", 128) == ("uniform", 128)
    for structure, multiple, why in (
        ("ragged", None, "takes the structure uniform"),
        (None, 32, "multiples of 64"),
        ("per_layer", 64, "takes the structure uniform"),
    ):
        with pytest.raises(SpecError, match=why):
            widths_for("vllm", structure, multiple)
    with pytest.raises(SpecError, match=r"engine must be one of .*, got 'vlm'"):
        widths_for("vlm", None, None)


def test_the_command_writes_them(tmp_path):
    """Every width of the mask, of a model that is wide enough; else it says so."""
    model = write_model(tmp_path / "moe", moe_intermediate_size=96)
    text = write_text(tmp_path / "text.txt")
    out = tmp_path / "out"
    args = ("prune", model, "--ratio", 0.5, "--corpus", text, *TINY)
    run(*args, "--method", "paper", "--for", "llama.cpp", "--out", out)
    config = json.loads((out / "config.json").read_text())
    assert config["moe_intermediate_size"] == 32  # 48 is no multiple
    assert "quantization_config" not in config
    assert "256" in refused(*args, "--for", "llama.cpp-q4_k")


@pytest.mark.parametrize(
    ("family", "change", "same"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}, False),
        ("qwen2_moe", {"norm_topk_prob": False}, True),
        ("qwen3_moe", {"norm_topk_prob": False}, False),
        ("qwen3_moe", {"norm_topk_prob": True}, True),
        ("olmoe", {"norm_topk_prob": True}, False),
        ("deepseek", {"norm_topk_prob": True}, False),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, False),
        ("deepseek_v2", {"topk_method": "greedy"}, True),
        ("deepseek", {"routed_scaling_factor": 2.0}, False),
        ("deepseek_v3", {"scoring_func": "sigmoid"}, True),
        ("deepseek_v3", {}, False),  # as transformers makes it
        ("mixtral", {}, True),
    ],
)
def test_what_llama_cpp_would_compute_otherwise(family, change, same):
    """Such a model is refused for llama.cpp, and for no other engine."""
    config = tiny_model(family, **change).config
    for engine in (None, "vllm"):
        check_computed(engine, config)
    for engine in ("llama.cpp", "llama.cpp-q4_k"):
        if same:
            check_computed(engine, config)
            continue
        setting = next(iter(change), "scoring_func")
        with pytest.raises(SpecError, match=f"other logits.*{setting}"):
            check_computed(engine, config)


def test_the_command_refuses_it_before_anything_is_measured(tmp_path):
    """The lab model's setting."""
    model = write_model(tmp_path / "moe", norm_topk_prob=True)
    out = tmp_path / "out"
    chosen = ("--ratio", 0.5, "--for", "llama.cpp", "--out", out)
    assert "llama.cpp would compute other logits" in refused("prune", model, *chosen)
    assert not out.exists()
