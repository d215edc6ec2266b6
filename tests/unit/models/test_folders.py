"""Folders of models: their code is never run, and damage is named in one line."""

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import manifest_of
from families import tiny_model
from house import PACKAGE
from keeps import widths_keep
from stored_tensors import configured
from transformers import AutoConfig

from benchmarks.lab_model.run_folder import begin_from
from heapr_lab import HeaprLabError, load_model, open_workbench, prune, save_pruned
from heapr_lab.checkpoints.same_model import own_table
from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.errors import SpecError
from heapr_lab.models.folders import (
    build,
    read_config,
    read_tokenizer,
    read_weights,
    skeleton_of,
)

READERS = {"from_pretrained", "from_config"}


@pytest.fixture
def folder(source, tmp_path) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(source, tmp_path / "moe"))


# --- loading ----------------------------------------------------------------------


def test_a_type_of_torchs_can_be_chosen(source):
    """As well as its name."""
    model, _ = load_model(str(source), device="cpu", dtype=torch.float64)
    assert next(model.parameters()).dtype == torch.float64
    assert not model.training


def test_a_wrong_name_is_an_error_that_says_what_is_expected(tmp_path):
    """A missing folder, a name that is not on the hub, a folder without a model."""
    absent = {"./absent", str(tmp_path / "absent")}
    for name in ("nobody/no-such-model", *absent, str(tmp_path)):
        with pytest.raises(SpecError) as caught:
            load_model(name)
        message = str(caught.value)
        assert repr(name) in message
        assert message.startswith("no such folder: ") == (name in absent)
        assert "local folder in the hub's layout, or one of lab" in message


def test_a_folder_without_a_tokenizer_is_named(folder):
    """Transformers would make a tokenizer that knows no word, and say nothing."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(SpecError, match=f"there is no tokenizer in {folder}: expected"):
        load_model(folder)


# --- code -------------------------------------------------------------------------


def calls(path: Path) -> Iterator[ast.Call]:
    """Calls in a file by which transformers reads or builds something."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in READERS:
            yield node


def test_every_call_says_that_code_is_not_trusted():
    """`trust_remote_code=False` stands in each call, and there are such calls."""
    by_file = {path.name: list(calls(path)) for path in PACKAGE.rglob("*.py")}
    assert {name for name, nodes in by_file.items() if nodes} == {"folders.py"}
    for node in by_file["folders.py"]:
        (option,) = [k.value for k in node.keywords if k.arg == "trust_remote_code"]
        assert ast.literal_eval(option) is False


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({mark!r}).touch()
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
class Config(Qwen2MoeConfig):
    model_type = "my_own"
class Model(Qwen2MoeForCausalLM):
    config_class = Config
"""


@pytest.fixture
def foreign(folder, tmp_path, monkeypatch) -> Path:
    """A folder with code of its own; whoever is asked says yes."""
    (folder / "evil.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    configured(model_type="my_own", auto_map=classes)(folder)
    classes = {"AutoTokenizer": ["evil.Tokenizer", None]}
    tokenizers = configured(auto_map=classes, tokenizer_class="EvilTokenizer")
    tokenizers(folder / "tokenizer_config.json")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_text: "y")
    return folder


def test_code_in_a_folder_is_never_run(foreign, tmp_path):
    """Nobody is asked whether to: an unknown model type is an error."""
    table = tmp_path / "table.parquet"
    for attempt in (
        lambda: load_model(foreign),
        lambda: open_workbench(foreign, profile="small"),
        lambda: read_tokenizer(foreign),
        lambda: read_weights(foreign),
        lambda: prune_folder(foreign, None, tmp_path / "out"),  # type: ignore[arg-type]
        lambda: own_table(table, foreign, name="x"),
        lambda: begin_from(tmp_path, foreign, torch.nn.Linear(1, 1)),
    ):
        with pytest.raises((HeaprLabError, FileNotFoundError)):
            attempt()
        assert not (tmp_path / "ran").exists()
    with pytest.raises(SpecError, match="trust_remote_code"):
        load_model(foreign)


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_code_beside_a_known_type_is_not_run(foreign, structure, tmp_path):
    """The class of transformers is taken, as it is for our own checkpoints.

    What is written names no code but ours, which `trust_remote_code` may load.
    """
    configured(model_type="qwen2_moe")(foreign)
    tokenizers = configured(tokenizer_class="Qwen2Tokenizer")
    tokenizers(foreign / "tokenizer_config.json")
    model, _ = load_model(foreign)
    assert type(model).__module__ == "transformers.models.qwen2_moe.modeling_qwen2_moe"
    config = read_config(foreign)
    build(config)
    skeleton_of(config)
    out = prune_folder(
        foreign, widths_keep(model, 4, structure=structure), tmp_path / "o"
    )
    assert not (tmp_path / "ran").exists()
    files = [json.loads(path.read_text()) for path in out.glob("*config.json")]
    named = [file["auto_map"] for file in files if "auto_map" in file]
    ours = [{"AutoModelForCausalLM": "modeling_heapr.Qwen2MoeForCausalLM"}]
    assert named == (ours if structure == "ragged" else [])


def test_a_pruned_checkpoint_loads_without_its_code(
    source, keep, tmp_path, monkeypatch
):
    """It names code for those without heapr_lab, which is not looked at here."""
    save_pruned(prune(read_weights(source), keep), tmp_path / "pruned")
    code = tmp_path / "pruned" / "modeling_heapr.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{code.read_text()}")
    monkeypatch.setattr("builtins.input", lambda *_text: "y")
    loaded, _ = load_model(tmp_path / "pruned", device="cpu")
    assert any(hasattr(m, "heapr_widths") for m in loaded.modules())
    assert not (tmp_path / "ran").exists()


# --- damage -----------------------------------------------------------------------

DAMAGED_JSON = ("", "{", '{"a": ', "[]", "null", '"text"', "\0\1", "[" * 100_000)


def one_line(error: pytest.ExceptionInfo[SpecError]) -> str:
    """The message, which is one line."""
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("text", DAMAGED_JSON, ids=range(len(DAMAGED_JSON)))
@pytest.mark.parametrize(
    "stem", ["config", "tokenizer", "tokenizer_config", "generation_config"]
)
def test_a_damaged_file_is_named(stem, text, folder, keep, tmp_path):
    """Anything may stand in it instead of an object; slicing writes nothing."""
    path = folder / f"{stem}.json"
    path.write_text(text)
    for attempt in (
        lambda: load_model(folder, device="cpu"),
        lambda: prune_folder(folder, keep, tmp_path / "out"),
    ):
        with pytest.raises(SpecError) as error:
            attempt()
        assert str(path) in one_line(error)
        assert "download it again" in one_line(error)
    assert {path.name for path in tmp_path.iterdir()} == {"moe"}


ABSURD = [
    ({"model_type": None}, "names no model_type"),
    ({"model_type": 5}, "names no model_type"),
    ({"model_type": "nonsense"}, "nonsense"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"hidden_size": -1}, "-1"),
    ({"num_attention_heads": 0}, "zero"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, but .* 2 layers"),
    ({"num_experts": 10**3}, "has in other shapes|lacks"),
    ({"hidden_act": "nonsense"}, "nonsense"),
    ({"rope_parameters": 5}, "rope_parameters"),
    ({"dtype": "nonsense"}, "nonsense"),
    ({"quantization_config": {"quant_method": "heapr"}}, "no widths of"),
]


@pytest.mark.parametrize(("changes", "message"), ABSURD)
def test_absurd_settings_are_named(changes, message, folder):
    """They are named before they are built, where that would take for ever."""
    configured(layer_types=None, **changes)(folder)
    with pytest.raises(SpecError, match=message) as error:
        load_model(folder, device="cpu")
    assert "config.json" in one_line(error)


INDEXES = [
    "", "{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": []}',
    '{"weight_map": {}}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": null}}',
    '{"weight_map": {"a": "../moe.safetensors"}}', '{"weight_map": {"a": "/etc/x"}}',
    "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", INDEXES, ids=range(len(INDEXES)))
def test_a_damaged_index_is_named(text, folder, tmp_path):
    """An index that names files elsewhere is damaged, too."""
    (folder / "model.safetensors").rename(tmp_path / "moe.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    for attempt in (lambda: load_model(folder), lambda: read_config(folder)):
        with pytest.raises(
            SpecError, match=r"model\.safetensors\.index\.json"
        ) as error:
            attempt()
        one_line(error)


def test_a_model_that_cannot_be_built_is_one_line():
    """A configuration without a model for language."""
    config = AutoConfig.for_model("vit")
    with pytest.raises(SpecError, match="ViTConfig"):
        skeleton_of(config)


# --- tokenizer --------------------------------------------------------------------


def test_the_manifest_says_why_there_is_no_tokenizer(source, keep, tmp_path):
    """There is none at hand, or none in the base model; or there is one."""
    pruned, _ = load_model(source, device="cpu")
    model = tiny_model("qwen2_moe", dtype=torch.float32)
    save_pruned(prune(model, keep), tmp_path / "nameless")
    model.save_pretrained(tmp_path / "base")
    prune_folder(tmp_path / "base", keep, tmp_path / "without")
    prune_folder(source, keep, tmp_path / "sliced")
    save_pruned(prune(pruned, keep), tmp_path / "saved")
    facts, cards = {}, {}
    for name in ("nameless", "without", "sliced", "saved"):
        facts[name] = manifest_of(tmp_path / name)
        cards[name] = (tmp_path / name / "README.md").read_text()
    assert "base model has no name" in facts["nameless"]["tokenizer"]
    assert "there is no tokenizer in base" in facts["without"]["tokenizer"]
    assert str(tmp_path) not in json.dumps(facts)
    assert "| tokenizer | none: there is no tokenizer in base" in cards["without"]
    for name in ("sliced", "saved"):
        assert facts[name]["tokenizer"] == "saved with the weights"
        assert (tmp_path / name / "tokenizer.json").is_file()
        assert "| tokenizer | saved with the weights |" in cards[name]
