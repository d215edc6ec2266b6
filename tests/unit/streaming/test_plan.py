"""What a run needs, before a weight is read; and that `load_model` does the same."""

import json
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import plan_table
import pytest
import torch
from families import tiny_model
from tiny_folder import write_folder

from benchmarks.machine import RESULTS
from benchmarks.streaming import CASES
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models import loading
from heapr_lab.models.loading import load_model
from heapr_lab.storage import paths
from heapr_lab.streaming import plan as planning
from heapr_lab.streaming.plan import IN_MEMORY, STREAMED, Plan, plan
from heapr_lab.streaming.stream import stream_of
from heapr_lab.workbench import workbench

CONFIGS = paths.project_dir() / "tests" / "data" / "shapes"
LENGTH = 512
"""The length of a window with activations several times as large as the weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny checkpoint, in float64."""
    return write_folder(tmp_path_factory.mktemp("moe"), tiny_model("qwen3_moe"))


# --- as measured, and as stated ---------------------------------------------------


@pytest.mark.parametrize(
    "row",
    pd.read_csv(RESULTS / "streaming.csv").to_dict("records"),
    ids=lambda row: f"{row['model']}, {row['way']}",
)
def test_what_fits_by_its_plan_fits(row, tmp_path):
    """A process that scored needed at most 4/3 of the plan, besides its libraries."""
    case = CASES[row["model"]]
    case.shape.config(case.shape.n_layers, torch.bfloat16).save_pretrained(tmp_path)
    needs = plan(tmp_path, n_sequences=1, seq_len=case.n_tokens, dtype="float32")
    assert needs.checkpoint_bytes == pytest.approx(row["checkpoint_bytes"], rel=1e-3)
    n_bytes = needs.needed_bytes[row["way"]]
    n_bytes += needs.states_bytes if row["way"] == STREAMED else 0
    assert row["peak_bytes"] <= n_bytes / 0.75 + 0.6e9
    assert n_bytes < 2 * row["peak_bytes"]


@pytest.mark.parametrize(
    ("shape", "billions"),
    [("Qwen3-30B-A3B", 30.5), ("DeepSeek-V3", 671.0), ("Kimi-K2", 1026.4)],
)
def test_true_shapes_have_their_parameters(shape, billions):
    """The totals that their makers state."""
    needs = plan(CONFIGS / shape)
    assert round(needs.n_parameters / 1e9, 1) == billions
    assert needs.checkpoint_bytes == 2 * needs.n_parameters
    assert needs.statistics_bytes == 56 * needs.n_atoms


def test_the_page_has_the_table_of_now():
    """`python docs/plan_table.py` would change nothing."""
    page = plan_table.PAGE.read_text("utf-8")
    assert plan_table.table() in page
    assert plan_table.with_table(page) == page


# --- what `load_model` does -------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seq_len", [2, LENGTH])
@pytest.mark.parametrize("share", [0.1, 0.99, 1.01, 100.0])
def test_both_stream_the_same(dtype, seq_len, share, folder, monkeypatch, caplog):
    """With room for a share of the scores of one window, and for the same reason."""
    options = {"seq_len": seq_len, "dtype": dtype}
    room = round(share * plan(folder, **options).needed_bytes[IN_MEMORY] / 0.75)
    monkeypatch.setattr(planning, "free_memory", lambda _device: room)
    loaded, _ = load_model(folder, device="cpu", **options)
    needs = plan(folder, memory=room, **options)
    assert (stream_of(loaded) is not None) == (needs.engine == STREAMED) == (share < 1)
    if share < 1:
        assert needs.why in caplog.text
        window = f"those of a window of {seq_len} tokens need"
        assert f"scores may take 75%: {window}" in needs.why
        whole, _ = load_model(folder, device="cpu", stream=False)
        assert stream_of(whole) is None


def test_a_workbench_leaves_room_for_its_own_windows(folder, monkeypatch):
    """The length of its profile, or the one that is given."""
    room = round(2 * plan(folder, seq_len=2).needed_bytes[IN_MEMORY])
    monkeypatch.setattr(planning, "free_memory", lambda _device: room)
    for seq_len, streams in ((2, False), (LENGTH, True), (None, True)):
        bench = workbench.open_workbench(str(folder), seq_len=seq_len, device="cpu")
        assert (stream_of(bench.model) is not None) == streams


def test_the_lab_model_is_in_memory():
    """Half a gigabyte is enough for windows four times as long as its profile's."""
    assert plan("lab", seq_len=1024, memory="0.5GB").engine == IN_MEMORY


def test_a_gpu_is_asked_for_its_memory(folder, monkeypatch):
    """The checkpoint's own type is that in memory."""
    monkeypatch.setattr(planning, "free_memory", {"auto": 3072 * 2**20}.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    needs = plan(folder)
    assert (needs.free_bytes, needs.dtype) == (3072 * 2**20, "float64")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan(folder).dtype == "float32"


# --- what it is told, and what it tells -------------------------------------------


def test_a_hub_id_whose_files_are_not_here(monkeypatch):
    """Its config.json is fetched, by either name of a model of the paper."""
    fetch = Mock(return_value=str(CONFIGS / "Qwen3-30B-A3B"))
    monkeypatch.setattr(loading, "snapshot_download", fetch)
    assert plan("qwen3-30b-a3b").n_atoms == 48 * 128 * 768
    fetch.assert_called_once_with("Qwen/Qwen3-30B-A3B", allow_patterns="config.json")


def test_a_dense_model_is_refused(tmp_path):
    """The message says what is expected of a model."""
    write_folder(tmp_path, tiny_model("llama", intermediate_size=24))
    with pytest.raises(LayoutError, match="found 0 MoE layers in Llama"):
        plan(tmp_path)


def test_a_plan_is_shown_and_is_json():
    """Its facts as lines; plain data for --json."""
    needs = plan(CONFIGS / "DeepSeek-V3", memory="141GB", dtype="bfloat16")
    for words in ("58 of 61", "671 B", "streamed", "in files", "first batch"):
        assert words in str(needs)
    assert Plan(**json.loads(json.dumps(needs.to_dict()))) == needs


def test_what_cannot_be_planned(tmp_path):
    """Foreign types and names are said, and experts without atoms, or too few."""
    path = tmp_path / "config.json"
    config = json.loads((CONFIGS / "Qwen3-30B-A3B" / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(config | quantised))
    needs = plan(path)
    assert needs.checkpoint_bytes == needs.n_parameters
    assert "dequantised" in needs.why
    with pytest.raises(SpecError, match=r"dtype must be one of 'auto', .*, got 'int8'"):
        plan(path, dtype="int8")
    for change, message in (
        ({"moe_intermediate_size": 0}, "experts of 0 atoms"),
        ({"num_experts_per_tok": 999}, r"a token to 999 experts and has \d+: correct"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(LayoutError, match=message):
            plan(path)
    with pytest.raises(SpecError, match=r"files of the model 'nobody/nothing'"):
        plan("nobody/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"empty' has no config\.json"):
        plan(tmp_path / "empty")
    with pytest.raises(SpecError, match=r"no such folder: '\./nothing'"):
        plan("./nothing")


def test_a_checkpoint_is_as_large_as_its_tensors(tmp_path):
    """Other files do not count, and it is not less than whole."""
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    write_folder(tmp_path, model, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    (tmp_path / "consolidated.safetensors").write_bytes(shards[0].read_bytes())
    needs = plan(tmp_path)
    assert needs.checkpoint_bytes == 4 * needs.n_parameters
    shards[1].unlink()
    with pytest.raises(SpecError, match="no such file beside it: download it"):
        plan(tmp_path)
