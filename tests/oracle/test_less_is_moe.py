"""Checkpoints in Less-is-MoE's format, read by a reader that knows only that format."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep, widths_keep
from safetensors.torch import load_file, save_file
from tiny_folder import write_model, write_text
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from heapr_lab.checkpoints.convert import convert
from heapr_lab.checkpoints.save import KEEP_FILE, MANIFEST_FILE, save_pruned
from heapr_lab.cli.app import app
from heapr_lab.errors import CacheError, HeaprLabError, SpecError
from heapr_lab.models.folders import read_weights
from heapr_lab.models.loading import load_model
from heapr_lab.models.ragged_experts import RaggedExperts
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.refinement.output_bias import add_output_bias
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

IDS = tiny_ids()
FORMAT = "less-is-moe"
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "deepseek_v2": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0},
}
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}


def read_portable(folder: Path) -> nn.Module:
    """The stock model of a portable checkpoint: each expert padded with zeros.

    From the description of the format alone: flat tensors, offsets that are sums of the
    widths before, gate rows first; the configuration has the original width.
    """
    plain = json.loads((folder / "config.json").read_text())
    entry = plain.pop("less_is_moe")
    assert (entry["format_version"], entry["weight_layout"]) == (
        1,
        "flat_gate_up_down_v1",
    )
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    width = plain.get("moe_intermediate_size", plain.get("intermediate_size"))
    for layer, widths in entry["expert_intermediate_sizes"].items():
        name = f"model.layers.{layer}.mlp.experts"
        rows = tensors.pop(f"{name}.gate_up_proj")
        columns = tensors.pop(f"{name}.down_proj")
        d_model, begin = plain["hidden_size"], 0
        for expert, own in enumerate(widths):
            first, size = 2 * d_model * begin, own * d_model
            matrices = {
                "gate_proj": rows[first : first + size].reshape(own, d_model),
                "up_proj": rows[first + size : first + 2 * size].reshape(own, d_model),
                "down_proj": columns[d_model * begin : d_model * begin + size].reshape(
                    d_model, own
                ),
            }
            for part, matrix in matrices.items():
                shape = (d_model, width) if part == "down_proj" else (width, d_model)
                padded = torch.zeros(shape, dtype=matrix.dtype)
                padded[: matrix.shape[0], : matrix.shape[1]] = matrix
                tensors[f"{name}.{expert}.{part}.weight"] = padded
            begin += own
    (architecture,) = plain["architectures"]
    plain["architectures"] = [architecture.removeprefix("Ragged")]
    assert architecture.startswith("Ragged")
    stock = folder.with_name(f"{folder.name}-stock")
    stock.mkdir()
    (stock / "config.json").write_text(json.dumps(plain))
    save_file(tensors, stock / "model.safetensors", metadata={"format": "pt"})
    model, said = AutoModelForCausalLM.from_pretrained(
        stock, dtype=torch.float32, output_loading_info=True
    )
    assert not any(said[name] for name in ("missing_keys", "unexpected_keys"))
    assert type(model).__name__ == plain["architectures"][0]
    return model


def keep_of(model: nn.Module, structure: str) -> KeepMask:
    """A random mask with an empty expert, or one of equal widths."""
    if structure == "ragged":
        return random_keep(model)
    return widths_keep(model, 4, structure=structure)


def masked_logits(model: nn.Module, keep: KeepMask) -> torch.Tensor:
    """What every form of the pruned model must give."""
    with masking(model, keep):
        return logits_of(model, IDS)


@pytest.fixture
def written(tmp_path: Path) -> tuple[nn.Module, KeepMask, Path]:
    """A tiny model, a mask, and the pruned model in the format."""
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    keep = random_keep(model)
    folder = save_pruned(prune(model, keep), tmp_path / "flat", format=FORMAT)
    return model, keep, folder


@pytest.mark.parametrize("structure", ["ragged", "per_layer", "uniform"])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_readers_find_the_masked_model(
    family: str, structure: str, tmp_path: Path
) -> None:
    """The stranger's, and ours, which keeps the experts small."""
    model = tiny_model(family, dtype=torch.float32, **FAMILIES[family])
    keep = keep_of(model, structure)
    expected = masked_logits(model, keep)
    folder = save_pruned(prune(model, keep), tmp_path / "flat", format=FORMAT)
    torch.testing.assert_close(logits_of(read_portable(folder), IDS), expected, **CLOSE)
    ours = read_weights(folder, dtype=torch.float32)
    torch.testing.assert_close(logits_of(ours, IDS), expected, **CLOSE)
    widths = [m.heapr_widths for m in ours.modules() if isinstance(m, RaggedExperts)]
    assert widths == [keep.by_layer(n).sum(1).tolist() for n in keep.layers]


def test_many_files_and_bfloat16(tmp_path: Path) -> None:
    """No tensor is lost where there are several files, and values are those in bf16."""
    model = tiny_model("qwen2_moe", dtype=torch.bfloat16)
    keep = random_keep(model)
    pruned = prune(model, keep)
    folder = save_pruned(pruned, tmp_path / "o", format=FORMAT, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    found = read_weights(folder, dtype="auto").state_dict()
    for name, tensor in pruned.state_dict().items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], tensor), name


def test_streamed_models_are_written_and_read(tmp_path: Path) -> None:
    """A layer at a time, both ways."""
    source = write_model(tmp_path / "dense")
    model, _ = load_model(source, device="cpu", stream=False)
    keep = random_keep(model)
    expected = masked_logits(model, keep)
    streamed, tokenizer = load_model(source, device="cpu", stream=True)
    folder = save_pruned(
        prune(streamed, keep), tmp_path / "o", tokenizer=tokenizer, format=FORMAT
    )
    torch.testing.assert_close(logits_of(read_portable(folder), IDS), expected, **CLOSE)
    again, _ = load_model(folder, device="cpu", stream=True)
    torch.testing.assert_close(logits_of(again, IDS), expected, **CLOSE)


def test_config_is_what_the_format_says(
    written: tuple[nn.Module, KeepMask, Path],
) -> None:
    """Nothing of our own format is left, and the original width is."""
    _, keep, folder = written
    plain = json.loads((folder / "config.json").read_text())
    assert plain["architectures"] == ["RaggedQwen3MoeForCausalLM"]
    assert not {"quantization_config", "auto_map"} & plain.keys()
    assert plain["moe_intermediate_size"] == 8
    assert plain["less_is_moe"]["expert_intermediate_sizes"] == {
        str(n): keep.by_layer(n).sum(1).tolist() for n in keep.layers
    }
    assert not list(folder.glob("*.py"))
    assert "VLLM_PLUGINS=less_is_moe_ragged" in (folder / "README.md").read_text()
    assert json.loads((folder / MANIFEST_FILE).read_text())["format"] == FORMAT


# --- what it cannot carry -----------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mixtral", "block_sparse_moe"),
        ("gpt_oss", "interleaved"),
        ("deepseek_v2", "none at model.layers.0.mlp.experts (a dense layer"),
        ("nemotron_h", "(a dense layer, or a model that names them otherwise)"),
    ],
)
def test_what_it_cannot_carry_is_refused(family: str, why: str, tmp_path: Path) -> None:
    """By name, and before anything is written."""
    model = tiny_model(family, dtype=torch.float32)
    pruned = prune(model, random_keep(model))
    with pytest.raises(SpecError, match=re.escape(why)):
        save_pruned(pruned, tmp_path / "flat", format=FORMAT)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SpecError, match="expected one of heapr, less-is-moe"):
        save_pruned(pruned, tmp_path / "flat", format="less is moe")


def test_output_biases_are_refused(tmp_path: Path) -> None:
    """Of a family that has none, too."""
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    pruned = prune(model, random_keep(model))
    add_output_bias(pruned, model, CalibrationSet.from_ids(IDS))
    with pytest.raises(SpecError, match="were given output biases"):
        save_pruned(pruned, tmp_path / "flat", format=FORMAT)
    assert list(tmp_path.iterdir()) == []


# --- files that are wrong -----------------------------------------------------------


def _sizes(plain: dict[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = plain["less_is_moe"]["expert_intermediate_sizes"]
    return sizes


def _swap(plain: dict[str, Any]) -> None:
    sizes = _sizes(plain)
    sizes["0"], sizes["1"] = sizes["1"], sizes["0"]


WRONG_CONFIGS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda c: c["less_is_moe"].update(format_version=2), "expected version 1"),
    (lambda c: c["less_is_moe"].update(weight_layout="v2"), "layout 'v2'"),
    (lambda c: c["less_is_moe"].pop("expert_intermediate_sizes"), "no widths"),
    (lambda c: c.update(less_is_moe=3), "expected version 1"),
    (lambda c: _sizes(c).pop("1"), "no widths of 'model.layers.1.mlp.experts'"),
    (lambda c: _sizes(c).update({"2": [1]}), "widths of 'model.layers.2.mlp.experts'"),
    (lambda c: _sizes(c)["0"].pop(), "expected 4 counts"),
    (lambda c: _sizes(c)["0"].__setitem__(1, 8.0), "expected 4 counts"),
    (_swap, "belongs to another checkpoint"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_CONFIGS)
def test_a_config_of_something_else_is_refused(
    written: tuple[nn.Module, KeepMask, Path],
    change: Callable[[dict[str, Any]], Any],
    message: str,
) -> None:
    """Nothing is filled in."""
    path = written[2] / "config.json"
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(HeaprLabError, match=re.escape(message)):
        read_weights(written[2], dtype=torch.float32)


@pytest.mark.parametrize("kind", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("wrong", ["missing", "short", "shaped"])
def test_a_tensor_of_something_else_is_refused(
    written: tuple[nn.Module, KeepMask, Path], kind: str, wrong: str
) -> None:
    """By its name."""
    path, name = written[2] / "model.safetensors", f"model.layers.1.mlp.experts.{kind}"
    tensors = load_file(path)
    own = tensors.pop(name)
    if wrong != "missing":
        tensors[name] = own[:-1] if wrong == "short" else own.reshape(-1, 16)
    save_file(tensors, path, metadata={"format": "pt"})
    why = "lacks" if wrong == "missing" else f"layers.1.mlp.experts.{kind}: found"
    with pytest.raises(SpecError, match=re.escape(why)):
        read_weights(written[2], dtype=torch.float32)


# --- to and fro ---------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["ragged", "per_layer", "uniform"])
def test_there_and_back(structure: str, tmp_path: Path) -> None:
    """The same tensors, mask and card, but for the format."""
    model = tiny_model("qwen2_moe", dtype=torch.float32)
    keep = keep_of(model, structure)
    facts = {"calibration": "a text", "perplexity": {"ptb": (10.0, 11.5)}}
    first = save_pruned(prune(model, keep), tmp_path / "a", base="a/b", facts=facts)
    flat = convert(first, tmp_path / "b", format=FORMAT)
    back = convert(flat, tmp_path / "c", format="heapr")
    tensors, again = (
        load_file(first / "model.safetensors"),
        load_file(back / "model.safetensors"),
    )
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    plain = [json.loads((f / "config.json").read_text()) for f in (first, back)]
    assert plain[0] == plain[1]
    assert KeepMask.read(back / KEEP_FILE).fingerprint == keep.fingerprint
    cards = [(f / "README.md").read_text() for f in (first, flat, back)]
    assert all("10.00 → 11.50" in card for card in cards)
    assert all("base_model: a/b" in card for card in cards)
    assert "every tensor equal" in cards[1]
    before, after = (json.loads((f / MANIFEST_FILE).read_text()) for f in (first, back))
    assert before["sha256"] == after["sha256"]
    assert "format" not in after


def test_one_that_was_made_elsewhere(
    written: tuple[nn.Module, KeepMask, Path], tmp_path: Path
) -> None:
    """It loads and is converted; no mask is made up."""
    model, keep, folder = written
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(folder / name, theirs / name)
    expected = masked_logits(model, keep)
    ours = convert(theirs, tmp_path / "ours", format="heapr")
    loaded = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32)
    torch.testing.assert_close(logits_of(loaded, IDS), expected, **CLOSE)
    assert not (ours / KEEP_FILE).exists()
    assert json.loads((ours / MANIFEST_FILE).read_text())["base_model"] is None
    back = convert(ours, tmp_path / "back", format=FORMAT)
    before, after = (load_file(f / "model.safetensors") for f in (theirs, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_mask_of_other_weights_is_refused(
    written: tuple[nn.Module, KeepMask, Path], tmp_path: Path
) -> None:
    """It would be written beside weights that it is not of."""
    model, _, folder = written
    random_keep(model, seed=7).write(folder / KEEP_FILE)
    with pytest.raises(CacheError, match="not the mask of the weights"):
        convert(folder, tmp_path / "out", format="heapr")
    assert not (tmp_path / "out").exists()


def test_a_dense_model_is_not_converted(tmp_path: Path) -> None:
    """There is nothing pruned in it."""
    source = write_model(tmp_path / "dense")
    with pytest.raises(SpecError, match="is not a pruned checkpoint"):
        convert(source, tmp_path / "out", format=FORMAT)


def test_commands(tmp_path: Path) -> None:
    """`prune --format`, `convert` and `evaluate` of what they wrote."""
    source = write_model(tmp_path / "dense")
    flat, back = tmp_path / "flat", tmp_path / "back"
    text = write_text(tmp_path / "text.txt")

    def run(*words: object) -> str:
        found = CliRunner().invoke(app, [str(word) for word in words])
        assert found.exit_code == 0, found.output
        return found.stdout

    small = ("--profile", "small", "--corpus", text, "--method", "paper")
    run("prune", source, "--ratio", 0.5, *small, "--format", FORMAT, "--out", flat)
    card = (flat / "README.md").read_text()
    assert "reloaded | Δ nll = 0.0000" in card
    run("convert", flat, "--format", "heapr", "--out", back)
    found = [
        json.loads(run("evaluate", f, "--corpora", text, "--profile", "small",
                       "--json"))
        for f in (flat, back)
    ]  # fmt: skip
    assert found[0]["results"] == found[1]["results"]


def test_a_family_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    """`prune` says so from the configuration."""
    AutoConfig.for_model("mixtral").save_pretrained(tmp_path / "m")
    asked = ["prune", str(tmp_path / "m"), "--ratio", "0.5", "--format", FORMAT]
    found = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "o")])
    assert found.exit_code == 2
    assert "cannot carry this MixtralForCausalLM" in found.output
