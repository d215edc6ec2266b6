"""A saved model is the masked model, for every structure and layout of experts."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, tiny_ids, tiny_model
from fences import fence
from house import imported_modules
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from keeps import check_masked, logits_of, masked_logits, random_keep, widths_keep
from processes import run_each
from stored_tensors import SINGLE, changed_json, changed_tensors, tensors_in
from tiny_folder import write_folder, write_model
from torch import nn
from transformers import AutoModelForCausalLM

from heapr_lab import KeepMask, load_model, masking, prune, save_pruned
from heapr_lab.checkpoints.save import KEEP_FILE
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts, sliced_experts
from heapr_lab.models.folders import read_weights
from heapr_lab.models.ragged_experts import RaggedExperts

IDS = tiny_ids()
LAYOUTS = (
    "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss", "glm4_moe",
    "granitemoe", "nemotron_h",
)  # fmt: skip
OWN = {"deepseek", "nemotron_h_puzzle"}
"""Not in transformers, so that their checkpoints do not load without heapr_lab."""
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}


WIDTHS: dict[str, Any] = {
    "aligned": ((0, 2, 4, 8), (8, 4, 0, 2)),
    "uniform": (4,),
    "per_layer": (2, 6),
}


def keep_of(model: nn.Module, structure: str) -> KeepMask:
    """A random mask whose widths obey `structure`: multiples of 2, of I = 8."""
    if structure == "ragged":
        return random_keep(model)
    return widths_keep(model, *WIDTHS[structure], structure=structure)


def saved(folder: Path, family: str, structure: str) -> tuple[nn.Module, KeepMask]:
    """A tiny model, the mask, and the pruned model saved in `folder`."""
    model = tiny_model(family, dtype=torch.float32)
    keep = keep_of(model, structure)
    save_pruned(prune(model, keep), folder)
    return model, keep


@pytest.mark.parametrize(
    ("family", "structure"),
    [
        *((family, "ragged") for family in FAMILIES),
        *((family, "uniform") for family in LAYOUTS),
        *(("qwen3_moe", structure) for structure in ("aligned", "per_layer")),
    ],
)
def test_what_is_loaded_is_the_masked_model(family, structure, tmp_path):
    """Equal to 1e-5 in float32, with experts of width 0 where the structure has them.

    Saved again, it has the same files. A uniform one is stock: nothing of ours is in
    config.json or beside it.
    """
    model, keep = saved(tmp_path / "one", family, structure)
    loaded = check_masked(tmp_path / "one", model, keep)
    ragged = [m for m in loaded.modules() if isinstance(m, RaggedExperts)]
    assert len(ragged) == (0 if structure == "uniform" else len(keep.layers))
    assert KeepMask.read(tmp_path / "one" / KEEP_FILE) == keep
    if structure == "uniform":
        config = json.loads((tmp_path / "one" / "config.json").read_text())
        assert {"quantization_config", "auto_map"} & config.keys() == set()
        assert not (tmp_path / "one" / "modeling_heapr.py").exists()
    loaded.save_pretrained(tmp_path / "two")
    stock = family in OWN or structure == "uniform"
    for name in (SINGLE, "config.json", *([] if stock else ["modeling_heapr.py"])):
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("family", LAYOUTS)
def test_tensors_have_natural_names_and_shapes(family, tmp_path):
    """One tensor for each projection of each expert, as wide as what it keeps."""
    model, keep = saved(tmp_path / "out", family, "ragged")
    layer = find_experts(model)[0]
    widths = keep.by_layer(layer.layer).sum(1).tolist()
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for name, tensor in tensors_in(tmp_path / "out").items():
        head, _, tail = name.partition(".experts.")
        if f".{layer.layer}." in head and tail.endswith(".weight"):
            shapes.setdefault(int(tail.split(".")[0]), set()).add(tuple(tensor.shape))
    D = layer.d_expert
    assert shapes == {e: {(w, D), (D, w)} for e, w in enumerate(widths)}
    assert widths[0] == 0


def test_a_pruned_model_is_no_quantised_one(tmp_path, monkeypatch):
    """What reads quantised weights is not needed, whatever its configuration says."""
    saved(tmp_path, "qwen3_moe", "ragged")
    monkeypatch.setitem(sys.modules, "heapr_lab.streaming.quantisation", None)
    assert read_weights(tmp_path)


def test_bfloat16_and_shards(tmp_path):
    """Saved in bf16 in several files, logits are those of the masked bf16 model."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    keep = random_keep(model)
    save_pruned(prune(model, keep), tmp_path / "out", max_shard_size="10KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    expected = masked_logits(model, IDS, keep)
    torch.testing.assert_close(logits_of(loaded, IDS), expected, rtol=0, atol=0.02)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="auto")
    torch.testing.assert_close(logits_of(mapped, IDS), logits_of(loaded, IDS))


def test_a_width_that_grouped_kernels_refuse_is_refused(tmp_path):
    """In float32 rows of 4 fill 16 bytes; no stock model would run with others."""
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    keep = widths_keep(model, 6, structure="uniform")
    with pytest.raises(SpecError, match="multiple of 4"):
        save_pruned(prune(model, keep), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_generation_and_training(tmp_path):
    """Greedy text with a cache is that of the masked model; a step lowers the loss."""
    model, keep = saved(tmp_path / "out", "qwen2_moe", "ragged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    with masking(model, keep):
        expected = model.generate(IDS[:1], **options)
    assert torch.equal(loaded.generate(IDS[:1], **options), expected)

    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = loaded(IDS, labels=IDS).loss
        loss.backward()
        experts = next(m for m in loaded.modules() if isinstance(m, RaggedExperts))
        assert experts.up_rows.grad.abs().max() > 0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    trained = logits_of(loaded, IDS)
    loaded.save_pretrained(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype="float32")
    torch.testing.assert_close(logits_of(again, IDS), trained, **CLOSE)


LOAD = """
import os, sys
sys.modules["heapr_lab"] = None  # so that it cannot be imported
os.environ["HF_MODULES_CACHE"] = "modules"
os.chdir({folder!r})
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(
    "out", trust_remote_code=True, dtype="float32"
)
ids = torch.load("ids.pt", weights_only=True)
with torch.no_grad():
    torch.save(model(ids, use_cache=False).logits, "logits.pt")
model.save_pretrained("again")
"""


def test_it_loads_where_heapr_lab_is_not(tmp_path):
    """It loads, and is saved again, with the module that the checkpoint carries.

    The module imports nothing of ours, also where it refuses something.
    """
    model, keep = saved(tmp_path / "out", "gpt_oss", "ragged")
    logits = masked_logits(model, IDS, keep)
    torch.save(IDS, tmp_path / "ids.pt")
    assert not imported_modules(tmp_path / "out" / "modeling_heapr.py")
    run_each(LOAD.format(folder=str(tmp_path)))
    got = torch.load(tmp_path / "logits.pt", weights_only=True)
    torch.testing.assert_close(got, logits, **CLOSE)
    check_masked(tmp_path / "again", model, keep)
    for name in (SINGLE, "config.json", "modeling_heapr.py"):
        one, two = tmp_path / "out" / name, tmp_path / "again" / name
        assert one.read_bytes() == two.read_bytes(), name


def test_a_newer_format_and_a_model_that_is_not_pruned(tmp_path):
    """Both are refused, before any weight is believed or written."""
    model, _ = saved(tmp_path / "out", "qwen2_moe", "ragged")
    with changed_json(tmp_path / "out") as config:
        config["quantization_config"]["format_version"] = 99
    with pytest.raises(ValueError, match="upgrade heapr_lab"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(SpecError, match=r"heapr_lab\.prune"):
        save_pruned(model, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- the type of the files ------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> Path:
    """A checkpoint in bfloat16, in which routers and corrections are in float32."""
    folder = tmp_path_factory.mktemp("halves")
    model = tiny_model("deepseek_v3", dtype=torch.bfloat16, tie_word_embeddings=True)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.rand(buffer.shape)  # no numbers of bfloat16
    write_folder(folder, model)
    with changed_tensors(folder) as tensors:
        for name in tensors:
            if name.endswith((".mlp.gate.weight", ".q_a_proj.weight")):
                tensors[name] = tensors[name] + torch.rand(tensors[name].shape) / 99
    return folder


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_files_have_the_type_of_the_source(structure, stream, halves, tmp_path):
    """The model runs in float32, and stays as it is; its files are smaller."""
    model, _ = load_model(halves, device="cpu", dtype="float32", stream=stream)
    pruned = prune(model, widths_keep(model, 8, structure=structure))
    before = logits_of(pruned, IDS)
    for dtype, name in ((None, "bfloat16"), (torch.float32, "float32")):
        save_pruned(pruned, tmp_path / name, dtype=dtype)
        same_types(tmp_path / name, halves, dtype or torch.bfloat16)
        written = tensors_in(tmp_path / name)
        for key, t in tensors_in(halves).items():
            assert t.dtype == torch.bfloat16 or torch.equal(written[key], t), key
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["dtype"] == name
        assert torch.equal(logits_of(pruned, IDS), before)
        again, _ = load_model(tmp_path / name, device="cpu", dtype="float32")
        torch.testing.assert_close(logits_of(again, IDS), before, **CLOSE)


def same_types(folder: Path, source: Path, dtype: torch.dtype) -> None:
    """All tensors are of a type, but those that the source has in float32."""
    wide = {k for k, t in tensors_in(source).items() if t.dtype == torch.float32}
    for name, tensor in tensors_in(folder).items():
        assert tensor.dtype == (torch.float32 if name in wide else dtype), name


def test_weights_that_changed_are_rounded(halves, tmp_path):
    """To the nearest number of the source's type; without a source, not at all."""
    model, _ = load_model(halves, device="cpu", dtype="float32", stream=False)
    pruned = prune(model, random_keep(model))
    (first, *_) = sliced_experts(pruned).values()
    first.down_columns.data += 1e-3
    save_pruned(pruned, tmp_path / "known")
    model.config._name_or_path = pruned.config._name_or_path = ""
    save_pruned(pruned, tmp_path / "unknown")
    known, unknown = (tensors_in(tmp_path / name) for name in ("known", "unknown"))
    for name, tensor in unknown.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16(), known[name].bfloat16()), name


# --- on a hub ---------------------------------------------------------------------


class LocalHub:
    """A hub whose repositories are folders in the working folder."""

    def create_repo(self, repo_id: str, **_options: Any) -> None:
        """Make the folder."""
        Path(repo_id).mkdir(parents=True)

    def upload_folder(
        self, *, repo_id: str, folder_path: str, allow_patterns: list[str]
    ) -> None:
        """Copy the files whose names match."""
        names = [path.name for path in Path(folder_path).iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copyfile(Path(folder_path) / name, Path(repo_id) / name)


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_the_upload_of_the_docs(structure, tmp_path, monkeypatch):
    """Every file of a checkpoint and nothing else; the card is what the hub needs."""
    source = write_model(tmp_path / "dense")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    model, tokenizer = load_model(source, device="cpu")
    keep, out = keep_of(model, structure), tmp_path / "pruned"
    save_pruned(
        prune(model, keep), out, tokenizer=tokenizer, base="someone/a-moe",
        source=source, max_shard_size="8KB",
    )  # fmt: skip
    (out / "LICENSE").write_text("Apache")
    files = {path.name for path in out.iterdir()}
    (out / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi", LocalHub)
    exec(fence("docs/checkpoints.md", "python upload"), {})
    pushed = tmp_path / "me" / "my-moe-pruned"
    assert {path.name for path in pushed.iterdir()} == files
    again, _ = load_model(pushed, device="cpu")
    # To rounding: where weights begin in memory decides how a product adds up.
    torch.testing.assert_close(
        logits_of(again, tiny_ids()), logits_of(prune(model, keep), tiny_ids())
    )
    data = ModelCard.load(pushed / "README.md").data
    assert (data.base_model, data.license) == ("someone/a-moe", "apache-2.0")
    assert data.library_name == "transformers"
    assert set(data.tags or ()) >= {"mixture-of-experts", "pruning", "heapr"}
    for name in ("README.md", "heapr_manifest.json", "config.json"):
        assert str(tmp_path) not in (pushed / name).read_text("utf-8")
